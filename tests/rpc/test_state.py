"""Saving and restoring slots over gRPC: between servers, in the middle of a text, and with all that can go wrong."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from service import errors
from service.config import StateSettings
from service.engine.settings import SpeculationSettings
from service.server import Server
from service.slot_images import Destination, SlotImages
from service.state.image import image_pieces, read_image
from service.state.integrity import chunks, digest_of
from service.state.manifest import decode
from service.state.uploads import Uploads
from slotwire.v1 import slot_pb2 as pb
from slotwire.v1 import slot_pb2_grpc as pb_grpc
from slotwire_client import (
    Client,
    DataLoss,
    FailedPrecondition,
    GenerateOptions,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    SlotwireError,
)
from slotwire_client.errors import from_rpc_error
from tests import random_models
from tests.conftest import DIGESTS, LIMIT, MODELS, TINY, serving, settings

DRAFT = MODELS / "tiny-hybrid-draft.Q8_0.gguf"
PROMPT = "The following functions are defined in the module: "
GREEDY = GenerateOptions(temperature=0, ignore_eos=True)


def config(**options: object) -> object:
    fields = {"slots": 2, "deterministic": True} | options
    return settings(speculation=SpeculationSettings(draft_model=DRAFT), **fields)  # type: ignore[arg-type]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Client, Client]]:
    """Two servers of one model, each with a client."""
    async with (
        serving(config=config()) as one,  # type: ignore[arg-type]
        serving(config=config()) as two,  # type: ignore[arg-type]
        Client(one.address) as here,
        Client(two.address) as there,
    ):
        yield here, there


async def image_of(client: Client, slot: int = 0) -> bytes:
    sink = io.BytesIO()
    await client.save_slot(slot, sink, timeout=LIMIT)
    return sink.getvalue()


async def text(client: Client, prompt: object, **options: object) -> list[int]:
    async with client.generate(prompt, **(GREEDY | options)) as generation:  # type: ignore[arg-type]
        return list((await generation.complete()).token_ids)


async def test_a_conversation_goes_on_in_another_server(pair: tuple[Client, Client], tmp_path: Path) -> None:
    here, there = pair
    tokens = await here.tokenize(PROMPT)
    history = [*tokens, *await text(here, tokens, max_tokens=30, slot_id=0), *await here.tokenize(" The")]
    file = tmp_path / "slot.bin"
    seen: list[tuple[int, int]] = []
    with file.open("wb") as sink:
        saved = await here.save_slot(0, sink, on_progress=lambda *at: seen.append(at))
    assert saved.size_bytes == file.stat().st_size == seen[-1][0] == seen[-1][1]
    expected = await text(here, history, max_tokens=30)
    restored = await there.restore_slot(file, slot_id=1, session="s")
    assert (restored.slot_id, restored.restored_tokens) == (1, saved.tokens)
    applied = {section.name for section in restored.sections if section.applied}
    assert {"tokens", "target", "manifest"} <= applied  # whether the draft model has drafted is measured
    async with there.generate(history, max_tokens=30, session="s", **GREEDY) as generation:
        result = await generation.complete()
    assert list(result.token_ids) == expected
    assert (result.slot_id, result.usage.reused_tokens) == (1, saved.tokens)


@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        GenerateOptions(temperature=0.9, seed=5, ignore_eos=True),
        GenerateOptions(temperature=0.9, seed=5, grammar='root ::= ("ab" | "ba" | "c" | " ")+', stop=["xyz"]),
    ],
)
async def test_a_generation_goes_on_in_another_server(pair: tuple[Client, Client], options: GenerateOptions) -> None:
    here, there = pair
    async with here.generate(PROMPT, max_tokens=300, slot_id=0, **options) as generation:
        async for _ in generation.events():
            if len(generation.text) > 20:
                break
        image = await image_of(here)
        restored = await there.restore_slot(image)
        whole = await generation.complete()
    assert restored.resumable
    async with there.resume(restored.slot_id) as going_on:
        rest = await going_on.complete()
    assert rest.usage.generated_tokens == whole.usage.generated_tokens == 300
    assert whole.text.endswith(rest.text)
    assert whole.token_ids[-len(rest.token_ids) :] == rest.token_ids
    assert 0 < len(rest.token_ids) < 300
    with pytest.raises(FailedPrecondition, match="could go on"):
        async with there.resume(restored.slot_id) as again:
            await again.complete()


async def test_a_busy_slot_can_be_saved_and_is_not_disturbed(pair: tuple[Client, Client]) -> None:
    here, _ = pair
    alone = await text(here, PROMPT, max_tokens=400, slot_id=0)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(text(here, PROMPT, max_tokens=400, slot_id=0))
        sizes = {len(await image_of(here)) for _ in range(20)}
    assert task.result() == alone
    assert len(sizes) > 3


Change = Callable[[dict[str, Any]], object]
HOSTILE: dict[str, Change] = {
    "a pending token that is none": lambda m: m.update(pending_token=10**6),
    "a grammar that its tokens do not follow": lambda m: m["sampling"]["request"]["sampling"].update(
        grammar={"gbnf": 'root ::= "zzz"'}
    ),
    "a grammar that is none": lambda m: m["sampling"]["request"]["sampling"].update(grammar={"gbnf": "root ::= ("}),
    "more draws than tokens": lambda m: m["sampling"].update(draws=1 << 23),
    "a prompt longer than the text": lambda m: m["sampling"].update(prompt_tokens=10**6),
    "mirostat": lambda m: m["sampling"]["request"]["sampling"].update(mirostat={"tau": 5}),
    "an end that is over": lambda m: m["sampling"]["request"].update(max_tokens=1),
    "a bias for a token that is none": lambda m: m["sampling"]["request"]["sampling"].update(logit_bias={"9999999": 1}),
    "options out of range": lambda m: m["sampling"]["request"]["sampling"].update(temperature=-1),
    "something else": lambda m: m["sampling"].update(request=[1, 2]),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_manifest_resumes_nothing(pair: tuple[Client, Client], name: str) -> None:
    """A manifest comes from outside like any request; what it says is checked before llama.cpp sees any of it."""
    here, there = pair
    async with here.generate(PROMPT, max_tokens=300, slot_id=0, temperature=0.9, seed=3) as generation:
        async for _ in generation.events():
            if len(generation.text) > 20:
                break
        read = read_image(await image_of(here)).image
    assert read.manifest is not None
    value = json.loads(read.manifest.encode())
    HOSTILE[name](value)
    changed = replace(read, manifest=decode(json.dumps(value).encode()))
    restored = await there.restore_slot(b"".join(image_pieces(changed)), slot_id=1)
    with pytest.raises((InvalidArgument, FailedPrecondition)):
        async with there.resume(1) as going_on:
            await going_on.complete()
    assert (await there.get_slot(1)).cached_tokens == restored.restored_tokens
    assert await text(there, PROMPT, max_tokens=5)


async def test_an_empty_slot_has_an_image(pair: tuple[Client, Client]) -> None:
    here, there = pair
    await text(there, PROMPT, max_tokens=5, slot_id=0)
    restored = await there.restore_slot(await image_of(here, 1), slot_id=0)
    assert restored.restored_tokens == 0
    assert (await there.get_slot(0)).cached_tokens == 0


async def test_what_is_refused_leaves_the_server_as_it_was(pair: tuple[Client, Client]) -> None:
    here, _ = pair
    await text(here, PROMPT, max_tokens=10, slot_id=0)
    image = await image_of(here)
    with pytest.raises(NotFound, match="slot 7"):
        await here.save_slot(7, io.BytesIO())
    with pytest.raises(NotFound, match="slot 7"):
        await here.restore_slot(image, slot_id=7)
    with pytest.raises(InvalidArgument, match="no slot image"):
        await here.restore_slot(b"x" * 1000)
    with pytest.raises(InvalidArgument, match="chunk_bytes"):
        await here.save_slot(0, io.BytesIO(), chunk_bytes=1)
    with pytest.raises(NotFound, match="no upload"):
        await here.restore_status("nobody")
    with pytest.raises(InvalidArgument, match="upload_id"):
        await here.restore_slot(image, upload_id="a/b")
    cut_off = await here.restore_slot(image[:-20], slot_id=1)  # the target state is whole, the manifest is not
    assert [section.name for section in cut_off.sections if not section.applied] == ["manifest"]
    assert (await here.get_slot(0)).cached_tokens > 10


async def test_a_busy_slot_takes_no_state(pair: tuple[Client, Client]) -> None:
    here, _ = pair
    async with here.generate(PROMPT, max_tokens=500, slot_id=0, **GREEDY) as generation:
        async for _ in generation:
            break
        with pytest.raises(FailedPrecondition, match="busy"):
            await here.restore_slot(await image_of(here), slot_id=0)


def stream(*parts: object) -> Iterator[pb.RestoreSlotRequest]:
    for part in parts:
        name = {pb.RestoreSlotHeader: "header", pb.SlotImageChunk: "chunk", pb.SlotImageTrailer: "trailer"}[type(part)]
        yield pb.RestoreSlotRequest(**{name: part})


async def send(server: Server, *parts: object) -> pb.RestoreSlotResponse:
    async with grpc.aio.insecure_channel(server.address) as channel:
        try:
            return await pb_grpc.SlotServiceStub(channel).RestoreSlot(stream(*parts), timeout=LIMIT)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


async def saved_parts(
    server: Server, chunk_bytes: int = 4096
) -> tuple[list[pb.SlotImageChunk], pb.SlotImageTrailer, int]:
    """A saved image as the server sends it, with its own checksums and digest."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = pb_grpc.SlotServiceStub(channel).SaveSlot(pb.SaveSlotRequest(slot_id=0, chunk_bytes=chunk_bytes))
        messages = [message async for message in call]
    chunks = [message.chunk for message in messages[1:-1]]
    assert all(chunk.HasField("crc32c") for chunk in chunks)
    return chunks, messages[-1].trailer, messages[0].header.size_bytes


async def test_streams_that_break_the_rules() -> None:
    async with serving(config=config()) as server, Client(server.address) as client:  # type: ignore[arg-type]
        await text(client, PROMPT, max_tokens=10, slot_id=0)
        chunks, trailer, size = await saved_parts(server)
        header = pb.RestoreSlotHeader(size_bytes=size, slot_id=1)
        assert len(chunks) > 4
        damaged = pb.SlotImageChunk(offset=chunks[1].offset, data=b"?" + chunks[1].data[1:], crc32c=chunks[1].crc32c)
        unchecked = pb.SlotImageChunk(offset=chunks[-1].offset, data=chunks[-1].data[:-1] + b"?")
        other = pb.SlotImageTrailer(digest="blake3:" + "0" * 64)
        cases: list[tuple[type[SlotwireError], str, tuple[object, ...]]] = [
            (InvalidArgument, "header", ()),
            (InvalidArgument, "header", (chunks[0],)),
            (InvalidArgument, "size_bytes", (pb.RestoreSlotHeader(),)),
            (ResourceExhausted, "limit", (pb.RestoreSlotHeader(size_bytes=1 << 41),)),
            (InvalidArgument, "chunk or trailer", (header, header)),
            (InvalidArgument, "trailer", (header, *chunks)),
            (OutOfRange, "goes on at", (header, chunks[1])),
            (OutOfRange, "goes on at", (header, chunks[0], chunks[0])),
            (OutOfRange, "goes on at", (header, chunks[0], chunks[2])),
            (OutOfRange, "beyond", (pb.RestoreSlotHeader(size_bytes=100), chunks[0])),
            (OutOfRange, "bytes", (header, *chunks[:-1], trailer)),
            (DataLoss, "CRC-32C", (header, chunks[0], damaged)),
            (DataLoss, "digest", (header, *chunks, other)),
            (DataLoss, "digest", (header, *chunks[:-1], unchecked, trailer)),
            (InvalidArgument, "digest", (header, *chunks, pb.SlotImageTrailer(digest="md5:00"))),
        ]
        for kind, words, parts in cases:
            with pytest.raises(kind, match=words):
                await send(server, *parts)
        assert server._uploads.usage.uploads == 0
        assert (await send(server, header, *chunks, trailer)).restored_tokens > 10


async def test_an_upload_that_broke_off_goes_on() -> None:
    state = StateSettings(digest_cache=DIGESTS, uploads=1)
    options = settings(slots=2, deterministic=True, state=state)
    async with serving(config=options) as server, Client(server.address) as client:
        await text(client, PROMPT, max_tokens=10, slot_id=0)
        chunks, _, size = await saved_parts(server)
        image = b"".join(chunk.data for chunk in chunks)
        header = pb.RestoreSlotHeader(size_bytes=size, slot_id=1, upload_id="mine", digest="sha256")
        with pytest.raises(InvalidArgument, match="trailer"):
            await send(server, header, *chunks[:3])
        status = await client.restore_status("mine")
        assert (status.committed_bytes, status.size_bytes) == (3 * 4096, size)
        with pytest.raises(ResourceExhausted, match="limit is 1"):
            await client.restore_slot(image)
        with pytest.raises(FailedPrecondition, match="bytes"):
            await client.restore_slot(image + b"more", upload_id="mine")
        sent: list[int] = []
        restored = await client.restore_slot(
            image, slot_id=1, upload_id="mine", chunk_bytes=4096, on_progress=lambda at, _: sent.append(at)
        )
        assert restored.restored_tokens > 10
        with pytest.raises(NotFound):
            await client.restore_status("mine")


async def test_a_state_of_another_model_or_context_is_refused_or_computed(tmp_path: Path) -> None:
    llama = random_models.llama(tmp_path / "llama.gguf")
    other = (
        random_models.llama(tmp_path / "other" / "llama.gguf", seed=2)
        if (tmp_path / "other").mkdir() is None
        else llama
    )
    plain = settings(slots=2)
    async with serving(llama, plain) as server, Client(server.address) as client:
        tokens = list(range(300, 340))
        expected = [*tokens, *await text(client, tokens, max_tokens=20, slot_id=0)]
        image = await image_of(client)
    for path, options, field in (
        (other, plain, "weights"),
        (llama, settings(slots=2, cache_type_k="f32"), "cache_type_k"),
        (llama, settings(slots=2, flash_attention="off"), "flash_attention"),
        (TINY, plain, None),
    ):
        async with serving(path, options) as server, Client(server.address) as client:
            if field is None:
                with pytest.raises(InvalidArgument, match="target state"):
                    await client.restore_slot(image)
            else:
                with pytest.raises(FailedPrecondition, match=f"{field} is") as caught:
                    await client.restore_slot(image)
                assert field in caught.value.metadata["fields"]
            restored = await client.restore_slot(image, recompute=True, slot_id=1)
            assert (restored.recomputed, restored.restored_tokens) == (True, len(expected) - 1)
            assert (await client.get_slot(1)).cached_tokens == len(expected) - 1
    async with serving(llama, settings(slots=2, slot_context=32)) as server, Client(server.address) as client:
        with pytest.raises(FailedPrecondition, match="a slot holds 32"):
            await client.restore_slot(image, recompute=True)


async def test_without_a_draft_model_its_section_is_dropped(pair: tuple[Client, Client]) -> None:
    here, _ = pair
    await text(here, PROMPT, max_tokens=10, slot_id=0)
    async with serving(config=settings(slots=2)) as server, Client(server.address) as bare:
        restored = await bare.restore_slot(await image_of(here))
        dropped = {section.name: section.reason for section in restored.sections if not section.applied}
        assert dropped in ({}, {"draft": "this server has no draft model"})  # whether it has drafted is measured
        back = io.BytesIO()
        await bare.save_slot(restored.slot_id, back)
    again = await here.restore_slot(back.getvalue())
    assert [section.name for section in again.sections] == ["tokens", "target", "manifest"]


@pytest.mark.parametrize("name", ["hybrid-state3.bin", "hybrid-draft-state3.bin", "hybrid-state2-plain-tokens.bin"])
async def test_files_of_llama_server_restore(name: str) -> None:
    """Its own continuation is in the golden README."""
    async with serving() as server, Client(server.address) as client:
        image = (MODELS.parent / "golden" / name).read_bytes()
        restored = await client.restore_slot(image, session="theirs")
        assert restored.restored_tokens == 44
        prompt = [0, *await client.tokenize(GOLDEN_PROMPT)]
        tokens = [*prompt, *await text(client, prompt, max_tokens=24, reuse_prefix=False)]
        assert await image_tokens(client, restored.slot_id) == tokens[:44]
        tokens += await client.tokenize(" The")
        async with client.generate(tokens, max_tokens=24, temperature=0, session="theirs") as generation:
            result = await generation.complete()
    assert result.usage.reused_tokens == 44
    assert result.text.startswith(" module's name, and the name of the file, and the name of the file")


GOLDEN_PROMPT = "The :func:`open` function returns a file object. If the argument is a string, then"


async def image_tokens(client: Client, slot: int) -> list[int]:
    return read_image(await image_of(client, slot)).image.tokens.ids.tolist()


@pytest.mark.parametrize("kind", ["hybrid", "mamba2", "llama", "sliding_window"])
async def test_hostile_bytes_do_no_harm(kind: str, tmp_path: Path) -> None:
    """Mutations of every kind: each is refused with a status or restored, and the neighbour's text stays the same."""
    dice = random.Random(5)
    model = TINY if kind == "hybrid" else getattr(random_models, kind)(tmp_path / "model.gguf")
    async with serving(model, settings(slots=2, context=1024)) as server, Client(server.address) as client:
        tokens = list(range(300, 330))
        expected = await text(client, tokens, max_tokens=12, slot_id=0)
        image = await image_of(client)
        uploads, images = server._uploads, server._streams._images
        before = await text(client, tokens[:9], max_tokens=6, slot_id=0)
        outcomes: dict[str, int] = {}
        for _ in range(2000):
            outcome = await attempt(images, uploads, mutated(image, dice))
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        assert uploads.usage.uploads == 0
        assert outcomes.get("restored", 0) > 5  # bits of tensors tell nothing
        assert len(outcomes) > 5
        assert await text(client, tokens[:9], max_tokens=6, slot_id=0) == before
        await client.restore_slot(image, slot_id=1)
        assert await text(client, tokens, max_tokens=12, slot_id=1) == expected


async def attempt(images: SlotImages, uploads: Uploads, data: bytes) -> str:
    """Upload and restore without a stream; returns what came of it."""
    if not data:
        return "empty"
    upload = uploads.begin(None, len(data))
    try:
        with upload.attached():
            for chunk in chunks([data], 1 << 16):
                upload.take(chunk)
            await images.restore(upload.finish(digest_of([data])), Destination(slot_id=1))
    except errors.SlotwireError as error:
        return error.reason
    finally:
        uploads.discard(upload)
    return "restored"


def mutated(image: bytes, dice: random.Random) -> bytes:
    data = bytearray(image)
    match dice.randrange(6):
        case 0:  # a bit anywhere
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        case 1:  # a bit near the front, where lengths and positions are
            data[dice.randrange(min(len(data), 1200))] ^= 1 << dice.randrange(8)
        case 2:  # an extreme number
            at = dice.randrange(0, len(data) - 8, 4)
            data[at : at + 4] = dice.choice([b"\0" * 4, b"\xff" * 4, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\1\0\0\0"])
        case 3:  # cut off
            del data[dice.randrange(len(data)) :]
        case 4:  # a piece twice, or gone
            at, size = dice.randrange(len(data)), dice.randrange(1, 64)
            data[at:at] = data[at : at + size] if dice.random() < 0.5 else b""
            del data[at : at + size * (dice.random() < 0.5)]
        case _:  # something behind it
            data += dice.randbytes(dice.randrange(1, 200))
    return bytes(data)
