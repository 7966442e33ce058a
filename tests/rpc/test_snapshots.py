"""Snapshots over gRPC: kept under a name, found after a restart of the server, and refused where they cannot be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.config import StateSettings
from service.server import Server
from slotwire_client import (
    Client,
    DataLoss,
    FailedPrecondition,
    GenerateOptions,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from tests.conftest import DIGESTS, serving, settings

PROMPT = "The following functions are defined in the module: "
GREEDY = GenerateOptions(temperature=0, ignore_eos=True)


def config(folder: Path, **state: object) -> object:
    stored = StateSettings(digest_cache=DIGESTS, store=str(folder), **state)  # type: ignore[arg-type]
    return settings(slots=2, deterministic=True, state=stored)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(config=config(tmp_path / "store")) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with Client(server.address) as client:
        yield client


async def talk(client: Client, prompt: object, **options: object) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt's were there."""
    async with client.generate(prompt, **(GREEDY | options)) as generation:  # type: ignore[arg-type]
        result = await generation.complete()
    return list(result.token_ids), result.usage.reused_tokens


async def test_a_conversation_survives_a_restart(tmp_path: Path) -> None:
    options = config(tmp_path / "store")
    async with serving(config=options) as server, Client(server.address) as client:  # type: ignore[arg-type]
        tokens = await client.tokenize(PROMPT)
        history = [*tokens, *(await talk(client, tokens, max_tokens=20, slot_id=0))[0], 300]
        saved = await client.snapshots.save("chats/anna", 0, metadata={"user": "anna"})
        expected, _ = await talk(client, history, max_tokens=20, slot_id=0)
    assert saved.tokens == len(history) - 2
    async with serving(config=options) as server, Client(server.address) as client:  # type: ignore[arg-type]
        assert await client.snapshots.get("chats/anna") == saved
        assert saved.metadata == {"user": "anna"}
        restored = await client.snapshots.restore("chats/anna", slot_id=1, session="anna")
        assert (restored.slot_id, restored.restored_tokens) == (1, saved.tokens)
        assert await talk(client, history, max_tokens=20, session="anna") == (expected, saved.tokens)


async def test_a_generation_goes_on_from_a_snapshot(client: Client) -> None:
    async with client.generate(PROMPT, max_tokens=300, slot_id=0, **GREEDY) as generation:
        async for _ in generation.events():
            if len(generation.text) > 20:
                break
        await client.snapshots.save("middle", 0)
        whole = await generation.complete()
    restored = await client.snapshots.restore("middle", slot_id=1)
    assert restored.resumable
    async with client.resume(1) as going_on:
        rest = await going_on.complete()
    assert whole.token_ids[-len(rest.token_ids) :] == rest.token_ids


async def test_they_are_listed_replaced_and_deleted(client: Client) -> None:
    await talk(client, PROMPT, max_tokens=5, slot_id=0)
    for name in ("b", "a/1", "a/2"):
        await client.snapshots.save(name, 0)
    assert [snapshot.name async for snapshot in client.snapshots.list()] == ["a/1", "a/2", "b"]
    assert [snapshot.name async for snapshot in client.snapshots.list("a/")] == ["a/1", "a/2"]
    with pytest.raises(FailedPrecondition, match="b"):
        await client.snapshots.save("b", 0)
    await talk(client, PROMPT, max_tokens=15, slot_id=0)
    assert (await client.snapshots.save("b", 0, overwrite=True)).tokens > 20
    await client.snapshots.delete("b")
    with pytest.raises(NotFound, match="b"):
        await client.snapshots.get("b")
    with pytest.raises(NotFound):
        await client.snapshots.restore("b")
    with pytest.raises(NotFound):
        await client.snapshots.delete("b")


async def test_bad_names_and_slots_are_refused(client: Client) -> None:
    for name in ("", "../etc", "/a", "a//b", "a b", "x" * 200):
        with pytest.raises(InvalidArgument, match="name"):
            await client.snapshots.save(name, 0)
    with pytest.raises(NotFound, match="slot 9"):
        await client.snapshots.save("a", 9)
    with pytest.raises(InvalidArgument, match="metadata"):
        await client.snapshots.save("a", 0, metadata={"k": "v" * 2000})


async def test_a_damaged_one_is_not_restored(client: Client, tmp_path: Path) -> None:
    await talk(client, PROMPT, max_tokens=5, slot_id=0)
    await client.snapshots.save("a", 0)
    (data,) = (tmp_path / "store" / "data").iterdir()
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    before = await client.get_slot(1)
    with pytest.raises(DataLoss, match="damaged"):
        await client.snapshots.restore("a", slot_id=1)
    assert await client.get_slot(1) == before


async def test_limits_are_kept(tmp_path: Path) -> None:
    options = config(tmp_path / "store", store_snapshots=1, snapshot_bytes=1 << 20)
    async with serving(config=options) as server, Client(server.address) as client:  # type: ignore[arg-type]
        await talk(client, PROMPT, max_tokens=5, slot_id=0)
        await client.snapshots.save("a", 0)
        with pytest.raises(ResourceExhausted, match="1"):
            await client.snapshots.save("b", 0)
        await client.snapshots.save("a", 0, overwrite=True)
