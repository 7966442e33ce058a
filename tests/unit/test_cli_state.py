"""`slotwire save`, `restore` and `generate --resume`, against real servers in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import os
import re
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.cli import main
from service.rpc.states import StateStreams
from service.server import Server
from service.slot_images import SavedImage, SlotImages
from service.state.image import image_pieces, read_image
from service.state.layout import BLOB_MAGIC
from service.state.sections import Draft
from service.state.upload import Upload
from slotwire_client import Client
from tests.conftest import LIMIT, serving, settings

PROMPT = "The following functions are defined in the module: "
LONG = tuple(range(300, 1300))
"""A prompt whose state is larger than some chunks."""
CHUNK = 256 << 10


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a server of the operator's, nor a terminal that is forced upon us."""
    for name in ("SLOTWIRE_SERVER", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(config=settings(slots=3, deterministic=True)) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with Client(server.address) as client:
        yield client


class Ran:
    """What a command left: its exit code, and what it wrote."""

    def __init__(self, code: int, out: bytes, err: str) -> None:
        self.code, self.raw, self.err = code, out, err

    @property
    def out(self) -> str:
        return self.raw.decode()

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Run = Callable[..., "asyncio.Future[Ran]"]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Runs a command beside the event loop of the servers."""

    async def run(*arguments: object) -> Ran:
        capfdbinary.readouterr()
        code = await asyncio.to_thread(main, [str(argument) for argument in arguments])
        captured = capfdbinary.readouterr()
        return Ran(code, captured.out, captured.err.decode())

    return lambda *arguments: asyncio.ensure_future(run(*arguments))


async def fill(client: Client, prompt: object = PROMPT, slot: int = 0, **options: object) -> str:
    defaults = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "slot_id": slot}
    async with client.generate(prompt, **(defaults | options)) as generation:  # type: ignore[arg-type]
        return (await generation.complete()).text


async def pause(client: Client, file: Path, **options: object) -> str:
    """Save slot 0 in the middle of a generation; returns the text that it had in the end."""
    defaults = {"max_tokens": 300, "temperature": 0, "ignore_eos": True, "slot_id": 0}
    async with client.generate(PROMPT, **(defaults | options)) as generation:  # type: ignore[arg-type]
        async for _ in generation:
            if len(generation.text) > 20:
                break
        with file.open("wb") as sink:
            assert (await client.save_slot(0, sink)).resumable
        return (await generation.complete()).text


@dataclasses.dataclass
class Line:
    """A connection to a server that breaks once `up` bytes were sent or `down` bytes came, and `broken` is set."""

    server: str
    up: float = float("inf")
    down: float = float("inf")
    broken: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    sent: int = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        async with asyncio.TaskGroup() as group:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                group.create_task(self._join(reader, writer))

            listener = await asyncio.start_server(accept, "127.0.0.1", 0)
            async with listener:
                yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.server.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        ways = {
            asyncio.create_task(self._relay(reader, far_writer, self.up, count=True)),
            asyncio.create_task(self._relay(far_reader, writer, self.down)),
        }
        _, open_ways = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in open_ways:
            way.cancel()
        await asyncio.wait(ways)
        for end in (writer, far_writer):
            end.transport.abort()

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: float, *, count: bool = False
    ) -> None:
        left = most
        try:
            while left > 0 and (data := await reader.read(int(min(left, 1 << 16)))):
                left -= len(data)
                self.sent += len(data) if count else 0
                writer.write(data)
                await writer.drain()
            if left <= 0:
                await self.broken.wait()
        except ConnectionError:
            pass


async def test_a_slot_is_saved_and_its_digest_told(server: Server, client: Client, run: Run, tmp_path: Path) -> None:
    await fill(client)
    file = tmp_path / "slot.bin"
    ran = await run("save", 0, file, "--server", server.address)
    data = file.read_bytes()
    tokens = len(read_image(data).image.tokens)
    digest = hashlib.sha256(data).hexdigest()
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"slot 0: {tokens} tokens, {len(data):,} bytes, sha256:{digest}, no generation to resume\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["slot.bin"]


async def test_a_slot_is_restored_and_what_became_of_it_told(
    server: Server, client: Client, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOTWIRE_SERVER", server.address)
    await fill(client)
    file = tmp_path / "slot.bin"
    assert (await run("save", 0, file)).code == 0
    ran = await run("restore", file, "--slot", 2, "--session", "mine", "--cache-key", "k")
    held = (await client.get_slot(0)).cached_tokens
    slot, used, times = ran.lines
    assert (ran.code, ran.err) == (0, "")
    assert slot == f"slot 2: {held} tokens"
    assert used == "used: tokens, target, manifest"
    assert re.fullmatch(rf"{file.stat().st_size:,} bytes received in [\d,]+ ms, applied in [\d,]+ ms", times)
    restored = await client.get_slot(2)
    assert (restored.cached_tokens, restored.session) == (held, "mine")
    assert (await run("restore", file, "--slot", 1, "--cache-key", "k")).code == 0
    prompt = [*read_image(file.read_bytes()).image.tokens.ids.tolist(), 300]
    for slot_id, key, reused in ((1, "other", 0), (2, "k", held)):
        async with client.generate(prompt, max_tokens=1, slot_id=slot_id, cache_key=key) as generation:
            assert (await generation.complete()).usage.reused_tokens == reused


async def test_a_file_goes_only_by_force(server: Server, client: Client, run: Run, tmp_path: Path) -> None:
    await fill(client)
    file, link = tmp_path / "slot.bin", tmp_path / "link"
    file.write_text("mine")
    link.symlink_to(file)
    ran = await run("save", 0, file, "--server", server.address)
    assert (ran.code, ran.out, ran.err) == (2, "", f"slotwire: {file} exists; --force replaces it\n")
    assert file.read_text() == "mine"
    assert (await run("save", 0, link, "--force", "--server", server.address)).code == 0
    assert link.is_symlink()
    read_image(file.read_bytes())
    assert sorted(os.listdir(tmp_path)) == ["link", "slot.bin"]


async def test_a_file_that_came_meanwhile_stays(
    server: Server, client: Client, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(client)
    file, save_slot = tmp_path / "slot.bin", Client.save_slot

    async def saved(*arguments: object, **options: object) -> object:
        result = await save_slot(*arguments, **options)  # type: ignore[arg-type]
        file.write_text("theirs")
        return result

    monkeypatch.setattr(Client, "save_slot", saved)
    ran = await run("save", 0, file, "--server", server.address)
    assert (ran.code, ran.err) == (2, f"slotwire: {file} exists; --force replaces it\n")
    assert file.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["slot.bin"]


async def test_a_stream_that_breaks_leaves_nothing(server: Server, client: Client, run: Run, tmp_path: Path) -> None:
    await fill(client, LONG)
    line = Line(server.address, down=300_000)
    line.broken.set()
    file = tmp_path / "slot.bin"
    async with line.open() as address:
        ran = await run("save", 0, file, "--server", address)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith(f"slotwire: cannot reach {address}: ")
        assert ran.err.count("\n") == 1
        assert os.listdir(tmp_path) == []
        file.write_text("mine")
        assert (await run("save", 0, file, "--force", "--server", address)).code == 1
    assert file.read_text() == "mine"
    assert os.listdir(tmp_path) == ["slot.bin"]


async def test_standard_output_gets_the_image_alone(server: Server, client: Client, run: Run) -> None:
    await fill(client)
    ran = await run("save", 0, "-", "--server", server.address)
    assert ran.code == 0
    assert hashlib.sha256(ran.raw).hexdigest() in ran.err
    assert ran.err.count("\n") == 1
    read_image(ran.raw)


async def test_no_draft_is_sent(server: Server, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, save = [], SlotImages.save

    async def noticed(self: SlotImages, slot_id: int, *, with_draft: bool = True) -> SavedImage:
        seen.append(with_draft)
        return await save(self, slot_id, with_draft=with_draft)

    monkeypatch.setattr(SlotImages, "save", noticed)
    assert (await run("save", 0, tmp_path / "with", "--server", server.address)).code == 0
    assert (await run("save", 0, tmp_path / "without", "--no-draft", "--server", server.address)).code == 0
    assert seen == [True, False]


async def test_a_section_that_is_dropped_is_named(server: Server, client: Client, run: Run, tmp_path: Path) -> None:
    await fill(client)
    file = tmp_path / "slot.bin"
    await run("save", 0, file, "--server", server.address)
    image = read_image(file.read_bytes()).image
    draft = Draft(BLOB_MAGIC.to_bytes(4, "little") + bytes(4) + image.target)  # one as good as any
    file.write_bytes(b"".join(image_pieces(dataclasses.replace(image, draft=draft))))
    ran = await run("restore", file, "--slot", 1, "--server", server.address)
    assert ran.code == 0
    assert ran.lines[1:3] == ["used: tokens, target, manifest", "dropped: draft: this server has no draft model"]


def send(pipe: int, data: bytes) -> None:
    with os.fdopen(pipe, "wb") as into:
        into.write(data)


async def test_standard_input_is_read_whole_and_from_where_it_is(
    server: Server, client: Client, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(client)
    file = tmp_path / "slot.bin"
    await run("save", 0, file, "--server", server.address)
    data = file.read_bytes()
    with file.open() as source:
        monkeypatch.setattr(sys, "stdin", source)
        ran = await run("restore", "-", "--slot", 1, "--server", server.address)
    assert ran.lines[0].startswith("slot 1: ")
    out, into = os.pipe()
    with os.fdopen(out) as source:
        monkeypatch.setattr(sys, "stdin", source)
        command = run("restore", "-", "--slot", 2, "--server", server.address)
        await asyncio.to_thread(send, into, data)
        ran = await command
    assert ran.lines[0].startswith("slot 2: ")
    assert (await client.get_slot(2)).cached_tokens == (await client.get_slot(0)).cached_tokens


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def buffer(self) -> io.BytesIO:
        raise AssertionError("nothing is written to or read from a terminal")


async def test_no_image_goes_to_a_terminal_or_comes_from_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    ran = await run("save", 0, "-", "--server", "127.0.0.1:1")
    assert (ran.code, "no text" in ran.err) == (2, True)
    monkeypatch.setattr(sys, "stdin", Terminal())
    ran = await run("restore", "-", "--server", "127.0.0.1:1")
    assert (ran.code, "name a FILE" in ran.err) == (2, True)


@pytest.mark.parametrize("command", ["save", "restore"])
async def test_a_terminal_sees_how_far_it_is(
    command: str, server: Server, client: Client, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(client)
    file = tmp_path / "slot.bin"
    if command == "restore":
        await run("save", 0, file, "--server", server.address)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    arguments = (0, file) if command == "save" else (file,)
    assert (await run(command, *arguments, "--server", server.address)).code == 0
    size = f"{file.stat().st_size / 1000:.1f}"
    assert {"save": "saving", "restore": "restoring"}[command] in terminal.getvalue()
    assert f"{size}/{size} kB" in terminal.getvalue()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("save", 0, "{new}"), 2, "save needs a running server: name it with --server or SLOTWIRE_SERVER"),
        (("restore", "{image}"), 2, "restore needs a running server: name it with --server or SLOTWIRE_SERVER"),
        (("generate", "--resume", 0), 2, "--resume needs a running server: name it with --server or SLOTWIRE_SERVER"),
        (("save", 7, "{new}", "--server", "{server}"), 1, "slot 7 does not exist; there are 3, from 0"),
        (("save", -1, "{new}", "--server", "{server}"), 2, 'Invalid value "-1" for SLOT. Must be >= 0.'),
        (("save", 0, "--forse", "--server", "{server}"), 2, 'Invalid value "--forse" for FILE. It is no option; '),
        (("save", 0, "{folder}", "--server", "{server}"), 2, "{folder} is no regular file"),
        (
            ("save", 0, "{folder}/a/b", "--server", "{server}"),
            1,
            "cannot write {folder}/a/b: No such file or directory",
        ),
        (("save", 0, "{new}", "--server", "127.0.0.1:1"), 1, "cannot reach 127.0.0.1:1: "),
        (("restore", "{new}", "--server", "{server}"), 1, "cannot read {new}: No such file or directory"),
        (("restore", "{folder}", "--server", "{server}"), 1, "cannot read {folder}: Is a directory"),
        (("restore", os.devnull, "--server", "{server}"), 1, "/dev/null is empty"),
        (("restore", __file__, "--server", "{server}"), 1, __file__ + ": it is no slot image (byte 0)"),
        (("restore", "{image}", "--slot", 7, "--server", "{server}"), 1, "slot 7 does not exist; there are 3, from 0"),
        (("restore", "{image}", "--upload-id", "a/b", "--server", "{server}"), 1, "upload_id: must be 1 to 128 of "),
        (("restore", "{image}", "--session", "\udcff", "--server", "{server}"), 2, "'utf-8' codec can't encode"),
        (("generate", "--resume", 0, "--server", "{server}"), 1, "slot 0 has no generation that could go on"),
        (("generate", "--resume", 7, "--server", "{server}"), 1, "slot 7 does not exist; there are 3, from 0"),
        (
            ("generate", "Hi", "--resume", 0, "--raw", "--slot", 1, "--top-p", 0.5, "--server", "{server}"),
            2,
            "--resume goes on as the generation began: leave PROMPT, --chat and --raw, --slot, --top-p out",
        ),
    ],
)
async def test_what_is_wrong_is_one_line(
    arguments: tuple[object, ...],
    code: int,
    message: str,
    server: Server,
    client: Client,
    run: Run,
    tmp_path: Path,
) -> None:
    await fill(client)
    image = tmp_path / "image.bin"
    with image.open("wb") as sink:
        await client.save_slot(0, sink)
    places = {"{server}": server.address, "{new}": tmp_path / "new", "{image}": image, "{folder}": tmp_path}

    def filled(text: object) -> str:
        words = str(text)
        for place, value in places.items():
            words = words.replace(place, str(value))
        return words

    ran = await run(*map(filled, arguments))
    assert (ran.code, ran.out.strip()) == (code, "")
    assert ran.err.startswith(f"slotwire: {filled(message)}")
    assert ran.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["image.bin"]


async def test_a_busy_slot_is_saved_but_takes_no_state(
    server: Server, client: Client, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "slot.bin"
    await pause(client, file)
    async with client.generate(PROMPT, max_tokens=1900, slot_id=1, temperature=0, ignore_eos=True) as generation:
        await anext(aiter(generation))
        ran = await run("restore", file, "--slot", 1, "--server", server.address)
    assert (ran.code, ran.err) == (1, "slotwire: slot 1 is busy\n")


async def test_a_state_that_does_not_fit_is_refused_or_computed(
    server: Server, client: Client, run: Run, tmp_path: Path
) -> None:
    await fill(client)
    file = tmp_path / "slot.bin"
    await run("save", 0, file, "--server", server.address)
    held = (await client.get_slot(0)).cached_tokens
    async with serving(config=settings(slots=2, cache_type_k="f32")) as other:
        ran = await run("restore", file, "--server", other.address)
        assert (ran.code, ran.out) == (1, "")
        assert "cache_type_k is f32 here and f16 there" in ran.err
        assert ran.err.count("\n") == 1
        ran = await run("restore", file, "--recompute", "--server", other.address)
        assert ran.code == 0
        assert ran.lines[0].endswith(f": {held} tokens computed, since their state does not fit")
        assert ran.lines[1] == "used: tokens"
        assert ran.lines[2].startswith("dropped: target: the state is of another model or context: cache_type_k is ")


async def test_an_upload_that_broke_goes_on_with_the_same_command(
    server: Server, client: Client, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(client, LONG)
    file = tmp_path / "slot.bin"
    await run("save", 0, file, "--server", server.address)
    size = file.stat().st_size
    line, loop, take = Line(server.address, up=size - 100_000), asyncio.get_running_loop(), Upload.take
    over, receive = asyncio.Event(), StateStreams.restore

    def taken(self: Upload, chunk: object) -> int:
        end = take(self, chunk)  # type: ignore[arg-type]
        loop.call_soon_threadsafe(line.broken.set)
        return end

    async def received(self: StateStreams, *arguments: object) -> object:
        try:
            return await receive(self, *arguments)  # type: ignore[arg-type]
        finally:
            over.set()

    monkeypatch.setattr(Upload, "take", taken)
    monkeypatch.setattr(StateStreams, "restore", received)
    command = ("restore", file, "--slot", 1, "--server")
    async with line.open() as address, asyncio.timeout(LIMIT):
        ran = await run(*command, address, "--upload-id", "mine")
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("slotwire: the connection broke: ")
        assert ran.err.endswith("; the same command goes on where it ended\n")
        await over.wait()  # the server knows, too
        committed = (await client.restore_status("mine")).committed_bytes
        assert CHUNK <= committed < size
        line.up, line.sent = float("inf"), 0
        ran = await run(*command, address, "--upload-id", "mine")
    assert ran.lines[0] == f"slot 1: {(await client.get_slot(0)).cached_tokens:,} tokens"
    assert size - committed < line.sent < size - committed + 50_000


async def test_an_upload_without_an_id_is_told_of_them(
    server: Server, client: Client, run: Run, tmp_path: Path
) -> None:
    await fill(client, LONG)
    file = tmp_path / "slot.bin"
    await run("save", 0, file, "--server", server.address)
    line = Line(server.address, up=100_000)
    line.broken.set()
    async with line.open() as address:
        ran = await run("restore", file, "--server", address)
    assert ran.code == 1
    assert ran.err.endswith("; with an --upload-id it could go on\n")


@pytest.mark.parametrize("options", [(), ("--json",), ("--timings",)])
async def test_a_restored_generation_goes_on(
    options: tuple[str, ...], server: Server, client: Client, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "slot.bin"
    whole = await pause(client, file)
    ran = await run("restore", file, "--slot", 1, "--server", server.address)
    assert ran.lines[-1] == "a generation can be resumed: slotwire generate --resume 1"
    again = tmp_path / "again.bin"
    assert (await run("save", 1, again, "--server", server.address)).out.endswith(", a generation can be resumed\n")
    ran = await run("generate", "--resume", 1, *options, "--server", server.address)
    assert ran.code == 0
    if options == ("--json",):
        assert ran.lines[0].startswith('{"event": "started"')
        assert '"slot_id": 1' in ran.lines[0]
        return
    assert 0 < len(ran.out) < len(whole)
    assert whole.endswith(ran.out.removesuffix("\n"))
    assert ran.err.startswith("300 tokens; " if options else "")
    assert (await run("generate", "--resume", 1, "--server", server.address)).code == 1


async def test_words_from_an_image_cannot_command_the_terminal(
    server: Server, client: Client, run: Run, tmp_path: Path
) -> None:
    file, evil = tmp_path / "slot.bin", tmp_path / "evil.bin"
    await pause(client, file)
    image = read_image(file.read_bytes()).image
    assert image.manifest is not None
    assert image.manifest.sampling is not None
    sampling = {**image.manifest.sampling, "request": {"max_tokens": "\x1b[2J\n\n"}}
    manifest = dataclasses.replace(image.manifest, sampling=sampling)
    evil.write_bytes(b"".join(image_pieces(dataclasses.replace(image, manifest=manifest))))
    ran = await run("restore", evil, "--slot", 1, "--server", server.address)
    assert (ran.code, "\x1b" in ran.out) == (0, False)
    assert "dropped: manifest: its generation cannot go on: " in ran.out
    assert len(ran.lines) == 4
