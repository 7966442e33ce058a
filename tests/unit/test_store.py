"""Snapshots by name, in a directory and in memory: what is kept, what a crash leaves, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import obstore
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from service.errors import (
    ConfigError,
    Conflict,
    DataLoss,
    Exhausted,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from service.state.directory import Directory
from service.state.integrity import digest_of
from service.state.names import check_name, key_of, name_of
from service.state.objects import CHUNK, DATA, ENTRIES, Feed, Objects, Source
from service.state.room import StoreLimits
from service.state.snapshot import MAX_ENTRY, Description, SnapshotInfo
from service.state.store import SnapshotStore, open_store
from tests.conftest import LIMIT

FULL = Description(tokens=7, model="tiny", fingerprint={"architecture": "lfm2", "loras": []}, metadata={"who": "Zoë"})
HOSTILE = (
    "", "/", "/etc/passwd", "a//b", "a/", "..", ".", "../x", "a/../b", "a/./b", "a/..", "a\\b", "a b", "a\n", "a\0b",
    "é", "a=b", "a#1", "%2e%2e", "~", "x" * 129, "a:b", "*", "\ud800",
)  # fmt: skip
NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,9}(/[A-Za-z0-9._-]{1,9}){0,3}", fullmatch=True).filter(
    lambda name: {".", ".."}.isdisjoint(name.split("/"))
)


class Rig:
    """A store, and the objects behind it."""

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self.raw = MemoryStore() if root is None else obstore.store.LocalStore(root, mkdir=True)

    def objects(self, kind: type[Objects] = Objects) -> Objects:
        """Of a kind that, for a directory, is joined with that."""
        if self.root is None:
            return kind(self.raw, LIMIT)
        joined: Any = Directory if kind is Objects else type("Joined", (kind, Directory), {})
        return cast("Objects", joined(self.root, LIMIT))

    def store(self, limits: StoreLimits | None = None, kind: type[Objects] = Objects) -> SnapshotStore:
        return SnapshotStore(self.objects(kind), limits or StoreLimits())

    def keys(self, folder: str) -> list[str]:
        """In a directory, of all files, also those that obstore does not list."""
        if self.root is not None:
            return sorted(os.listdir(self.root / folder))
        found = obstore.list_with_delimiter(self.raw, folder)["objects"]
        return sorted(item["path"].removeprefix(f"{folder}/") for item in found)

    def read(self, folder: str, key: str) -> bytes:
        return bytes(obstore.get(self.raw, f"{folder}/{key}").bytes())

    def write(self, folder: str, key: str, content: bytes) -> None:
        obstore.put(self.raw, f"{folder}/{key}", content)

    def data_of(self, name: str) -> str:
        key = json.loads(self.read(ENTRIES, key_of(name)))["data"]
        assert isinstance(key, str)
        return key


@pytest.fixture(params=["directory", "memory"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(tmp_path / "store" if request.param == "directory" else None)


@pytest.fixture
def local(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "store")


class Gate:
    """Pieces that stop after the first one, until they are let go."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.pieces[0]
        self.reached.set()
        await self.open.wait()
        for piece in self.pieces[1:]:
            yield piece


async def given_pieces(*pieces: bytes | memoryview) -> AsyncIterator[bytes | memoryview]:
    for piece in pieces:
        yield piece


async def broken_pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
    raise OverflowError("the slot is gone")


async def put(store: SnapshotStore, name: str, data: bytes = b"state", *, overwrite: bool = False) -> None:
    await store.put(name, len(data), given_pieces(data), Description(), overwrite=overwrite)


async def content(store: SnapshotStore, name: str) -> bytes:
    _, chunks = await store.get(name)
    return b"".join([chunk async for chunk in chunks])


async def read_into(read: list[bytes], store: SnapshotStore, name: str) -> None:
    _, chunks = await store.get(name)
    async for chunk in chunks:
        read.append(chunk)  # noqa: PERF401 -- what came before an error stays


async def names(store: SnapshotStore) -> list[str]:
    return [info.name for info in (await store.list()).snapshots]


@contextlib.contextmanager
def nothing_changes(rig: Rig) -> Iterator[None]:
    before = {folder: {key: rig.read(folder, key) for key in rig.keys(folder)} for folder in (ENTRIES, DATA)}
    yield
    after = {folder: {key: rig.read(folder, key) for key in rig.keys(folder)} for folder in (ENTRIES, DATA)}
    assert after == before


# What is kept


@pytest.mark.parametrize("size", [0, 1, CHUNK, 3 * CHUNK + 7, 20 << 20])
@pytest.mark.parametrize("piece", [999_983, 1 << 30])
async def test_what_was_put_comes_back(rig: Rig, size: int, piece: int) -> None:
    data = os.urandom(size)
    store = SnapshotStore(rig.objects(), StoreLimits(), clock=lambda: 1234.5)
    pieces = given_pieces(*(memoryview(data)[start : start + piece] for start in range(0, size, piece)))
    info = await store.put("chat/1", size, pieces, FULL)
    assert (info.name, info.bytes, info.created, info.digest) == ("chat/1", size, 1234.5, digest_of([data]))
    assert (info.tokens, info.model, info.fingerprint, info.metadata) == (
        FULL.tokens, FULL.model, FULL.fingerprint, FULL.metadata,
    )  # fmt: skip
    again = rig.store()
    found, chunks = await again.get("chat/1")
    assert b"".join([chunk async for chunk in chunks]) == data
    assert found == info == await again.info("chat/1")
    assert (await again.list()).snapshots == (info,)
    assert rig.read(DATA, rig.data_of("chat/1")) == data  # a slot image as llama-server reads it


async def test_a_piece_may_change_once_the_next_is_asked_for(rig: Rig) -> None:
    async def pieces() -> AsyncIterator[memoryview]:
        buffer = bytearray(300_000)
        for value in range(100):
            buffer[:] = bytes([value]) * len(buffer)
            yield memoryview(buffer)

    store = rig.store()
    await store.put("a", 0, pieces(), Description())
    assert await content(store, "a") == b"".join(bytes([value]) * 300_000 for value in range(100))


async def test_memory_does_not_grow_with_the_snapshot(local: Rig) -> None:
    piece = os.urandom(1 << 20)
    store = local.store()
    await store.put("warm", 0, given_pieces(*[piece] * 8), Description())
    before, peak = psutil.Process().memory_info().rss, 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal peak
        for _ in range(256):
            yield piece
            peak = max(peak, psutil.Process().memory_info().rss)

    await store.put("large", 0, pieces(), Description())
    _, chunks = await store.get("large")
    async for _ in chunks:
        peak = max(peak, psutil.Process().memory_info().rss)
    assert peak - before < 100 << 20


async def test_a_name_is_taken_once_and_replaced_where_that_is_asked_for(rig: Rig) -> None:
    store = rig.store()
    await put(store, "a", b"old")
    untouched = given_pieces(b"new")
    with nothing_changes(rig), pytest.raises(Conflict, match="snapshot a already"):
        await store.put("a", 3, untouched, Description())
    assert await anext(untouched) == b"new"
    await put(store, "a", b"new", overwrite=True)
    assert await content(store, "a") == b"new"
    assert len(rig.keys(DATA)) == 1


@pytest.mark.parametrize("stores", [1, 2])
async def test_of_two_that_take_a_name_at_once_one_gets_it(rig: Rig, stores: int) -> None:
    first, second = rig.store(), rig.store()
    gates = [Gate(b"first ", b"one"), Gate(b"second ", b"one")]
    puts = [
        asyncio.create_task(store.put("a", 10, gate, Description()))
        for store, gate in zip((first, second if stores == 2 else first), gates, strict=True)
    ]
    async with asyncio.timeout(LIMIT):
        for gate in gates:
            await gate.reached.wait()
        for gate in gates:
            gate.open.set()
        results = await asyncio.gather(*puts, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Conflict", "SnapshotInfo"]
    won = b"first one" if isinstance(results[1], Conflict) else b"second one"
    assert await content(first, "a") == won
    assert len(rig.keys(DATA)) == 1


@pytest.mark.parametrize("change", ["delete", "overwrite"])
async def test_who_reads_already_reads_to_the_end(rig: Rig, change: str) -> None:
    store, data = rig.store(), os.urandom(5 * CHUNK)
    await put(store, "a", data)
    _, chunks = await store.get("a")
    read = await anext(chunks)
    await (store.delete("a") if change == "delete" else put(store, "a", b"new", overwrite=True))
    assert read + b"".join([chunk async for chunk in chunks]) == data


async def test_what_was_deleted_is_gone_and_so_is_its_data(rig: Rig) -> None:
    store = rig.store()
    await put(store, "a/b")
    await put(store, "a")
    await store.delete("a")
    for missing in (store.info("a"), store.get("a"), store.delete("a")):
        with pytest.raises(NotFound, match=r"no snapshot a$"):
            await missing
    assert await content(store, "a/b") == b"state"
    assert len(rig.keys(DATA)) == 1


async def test_replacing_between_entry_and_data_is_not_noticed(rig: Rig) -> None:
    class Replaced(Objects):
        """When the data is opened first, there is another already."""

        done = False

        async def open(self, folder: str, key: str) -> Source | None:
            if folder == DATA and not self.done:
                self.done = True
                await put(other, "a", b"new", overwrite=True)
            return await super().open(folder, key)

    other = rig.store()
    await put(other, "a", b"old")
    assert await content(rig.store(kind=Replaced), "a") == b"new"


@pytest.mark.parametrize(
    "description",
    [
        Description(tokens=-1),
        Description(model="x" * 513),
        Description(model="\ud800"),
        Description(fingerprint={"scale": float("nan")}),
        Description(fingerprint={"of": object()}),
        Description(fingerprint={"text": "\ud800"}),
        Description(fingerprint={"text": "x" * (MAX_ENTRY - 4096)}),
        Description(metadata={"": "x"}),
        Description(metadata={"k" * 65: "x"}),
        Description(metadata={"k": "x" * 1025}),
        Description(metadata={"k": "\udfff"}),
        Description(metadata={str(number): "" for number in range(65)}),
    ],
)
async def test_a_description_that_cannot_be_kept_is_refused_at_once(description: Description) -> None:
    store = open_store("memory:")
    with pytest.raises(InvalidRequest):
        await store.put("a", 1, given_pieces(b"x"), description)
    assert await names(store) == []


async def test_the_largest_description_can_be_read_again(rig: Rig) -> None:
    store = rig.store()
    # 59,9 KB of the 60 that there are, in characters that JSON may write as six
    most = Description(1 << 24, "ü" * 512, {"a": "ü" * 29_000}, {"k": "v"})
    name = "n" * 128
    info = await store.put(name, 1, given_pieces(b"x"), most)
    assert await store.info(name) == info
    assert info.fingerprint == most.fingerprint


# Names


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_name_is_refused_everywhere(local: Rig, name: str) -> None:
    store = local.store()
    with nothing_changes(local):
        for call in (store.get, store.info, store.delete):
            with pytest.raises(InvalidRequest, match="name: must be 1 to 128"):
                await call(name)
        with pytest.raises(InvalidRequest, match="name: must be 1 to 128"):
            await put(store, name)


async def test_names_that_look_alike_are_different(rig: Rig) -> None:
    store = rig.store()
    odd = ["..a", "...", "-rf", "A", "a", "a-b", "a.b", "a.json", "a/b", "a/b.json/c", "a_b", "x" * 128]
    for name in odd:
        await put(store, name, name.encode())
    assert await names(store) == sorted(odd)
    for name in odd:
        assert await content(store, name) == name.encode()


@given(NAMES)
def test_each_name_has_a_flat_key_of_its_own(name: str) -> None:
    check_name(name)
    assert "/" not in key_of(name)
    assert name_of(key_of(name)) == name


@given(st.text(alphabet="ab./=#-\\%\0", max_size=12))
def test_a_key_that_is_no_name_is_none(key: str) -> None:
    name = name_of(key)
    assert name is None or key_of(name) == key


# Lists


async def test_pages_are_in_order_and_changes_between_them_repeat_nothing(rig: Rig) -> None:
    store = rig.store()
    for number in range(0, 20, 2):
        await put(store, f"n{number:02}")
    first = await store.list("n", 4)
    assert [info.name for info in first.snapshots] == ["n00", "n02", "n04", "n06"]
    await put(store, "n01")  # before the place
    await put(store, "n09")  # behind it
    await store.delete("n06")  # the place itself
    await store.delete("n08")  # what would be next
    await put(store, "n10", b"other", overwrite=True)
    second = await store.list("n", 4, first.next_token)
    assert [info.name for info in second.snapshots] == ["n09", "n10", "n12", "n14"]
    third = await store.list("n", 4, second.next_token)
    assert [info.name for info in third.snapshots] == ["n16", "n18"]
    assert third.next_token == ""
    assert (await store.list("n", 4, first.next_token)) == second


async def test_the_last_full_page_has_no_token(rig: Rig) -> None:
    store = rig.store()
    for name in "abcd":
        await put(store, name)
    token = (await store.list("", 2)).next_token
    assert (await store.list("", 2, token)).next_token == ""
    await store.delete("c")
    await store.delete("d")
    assert (await store.list("", 2, token)).snapshots == ()


async def test_a_prefix_is_one_of_characters(rig: Rig) -> None:
    store = rig.store()
    for name in ("a/b", "a/c/d", "ab", "b"):
        await put(store, name)
    for prefix, expected in (("a", ["a/b", "a/c/d", "ab"]), ("a/", ["a/b", "a/c/d"]), ("..", []), ("c", [])):
        assert [info.name for info in (await store.list(prefix)).snapshots] == expected


async def test_what_goes_while_a_page_is_read_is_left_out(rig: Rig) -> None:
    class Deleting(Objects):
        async def read(self, folder: str, key: str, most: int) -> bytes | None:
            if key == "b":
                await other.delete("b")
            return await super().read(folder, key, most)

    other = rig.store()
    for name in "abc":
        await put(other, name)
    assert await names(rig.store(kind=Deleting)) == ["a", "c"]


async def test_bad_pages_are_refused(rig: Rig) -> None:
    store = rig.store()
    for name in ("aa", "ab", "ac", "ba"):
        await put(store, name)
    token = (await store.list("a", 1)).next_token
    for bad in ("x", "é", token + "A", token[:-4], token[::-1], "A" * 4096, "MQph", "MQoKLi4vLi4="):
        with pytest.raises(InvalidRequest, match="page_token"):
            await store.list("a", 1, bad)
    for prefix in ("", "b", "ab"):
        with pytest.raises(InvalidRequest, match="page_token"):
            await store.list(prefix, 1, token)
    for size in (-1, 1001):
        with pytest.raises(InvalidRequest, match="page_size: must be 0 to 1000"):
            await store.list("", size)
    for prefix in ("é", "a=", "x" * 129):
        with pytest.raises(InvalidRequest, match="prefix"):
            await store.list(prefix)


# What breaks off


async def test_pieces_that_fail_leave_nothing(rig: Rig) -> None:
    store = rig.store()
    await put(store, "a", b"old")
    with nothing_changes(rig):
        for name in ("a", "b"):
            with pytest.raises(OverflowError, match="slot is gone"):
                await store.put(name, 0, broken_pieces(*[bytes(CHUNK)] * 20), Description(), overwrite=True)


async def test_a_cancelled_put_leaves_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    store = rig.store()
    await put(store, "a", b"old")
    with nothing_changes(rig):
        for name in ("a", "b"):
            gate = Gate(bytes(20 << 20), b"")
            task = asyncio.create_task(store.put(name, 0, gate, Description(), overwrite=True))
            async with asyncio.timeout(LIMIT):
                await gate.reached.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
    assert caplog.records == []  # asyncio tells of tasks that nobody ended


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_put_that_is_cancelled_before_its_entry_is_written_leaves_nothing(rig: Rig, cancels: int) -> None:
    class Slow(Objects):
        written, go_on = asyncio.Event(), asyncio.Event()

        async def upload(self, folder: str, key: str, feed: Feed, size: int) -> None:
            await super().upload(folder, key, feed, size)
            self.written.set()
            await self.go_on.wait()

    store = rig.store(kind=Slow)
    rig.objects()
    with nothing_changes(rig):
        task = asyncio.create_task(store.put("a", 5, given_pieces(b"state"), Description()))
        async with asyncio.timeout(LIMIT):
            await Slow.written.wait()
            assert len(rig.keys(DATA)) == 1
            task.cancel()
            await asyncio.sleep(0)  # one turn of the loop, in which it sees that
            if cancels == 1:
                Slow.go_on.set()
            else:
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            Slow.go_on.set()
            await store.close()


async def test_data_is_on_the_disk_before_there_is_an_entry(local: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local.root is not None
    store, root, synced = local.store(), local.root, []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(root)
        synced.append((str(path), local.keys(ENTRIES)))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    await put(store, "a")
    data = local.data_of("a")
    assert synced == [(f"{DATA}/{data}", []), (DATA, []), (f"{ENTRIES}/a", ["a"]), (ENTRIES, ["a"])]


async def test_an_upload_has_a_time_limit_but_for_waiting_for_pieces() -> None:
    times: list[float] = []

    class Limit:
        def expired(self) -> bool:
            return False

        def reschedule(self, when: float | None) -> None:
            times.append(0 if when is None else round(when - asyncio.get_running_loop().time()))

    feed = Feed().timed(cast("asyncio.Timeout", Limit()), 1000)
    taking = asyncio.ensure_future(anext(aiter(feed)))
    async with asyncio.timeout(LIMIT):
        await feed.put(b"x")
        assert await taking == b"x"
        await feed.put(None)
        assert [piece async for piece in feed] == []
    assert times == [0, 1000, 0, 2000]


CRASH = """
import asyncio, os, signal, sys
from service.state.entries import Entries
from service.state.snapshot import Description
from service.state.store import open_store

where, root = sys.argv[1:]

async def pieces():
    for _ in range(20):
        yield bytes(1 << 20)
    if where == "data":
        os.kill(os.getpid(), signal.SIGKILL)

async def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if where == "entry":
    Entries.write = killed
asyncio.run(open_store(root).put("a", 20 << 20, pieces(), Description(), overwrite=True))
"""


@pytest.mark.parametrize("where", ["data", "entry"])
async def test_a_process_that_is_killed_leaves_nothing_that_is_seen_and_a_sweep_removes_it(
    local: Rig, where: str
) -> None:
    store = local.store()
    await put(store, "a", b"old")
    command = [sys.executable, "-c", CRASH, where, str(local.root)]
    result = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=LIMIT, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert len(local.keys(DATA)) == 2  # it did leave something
    assert await names(store) == ["a"]
    assert await content(store, "a") == b"old"
    assert await store.sweep() == 0
    assert await store.sweep(grace=-1) == 1
    assert local.keys(DATA) == [local.data_of("a")]
    assert await content(store, "a") == b"old"


async def test_a_sweep_leaves_what_is_named_on_its_way_or_not_its_own(rig: Rig) -> None:
    store, garbage = rig.store(), "0" * 32
    await put(store, "a", b"kept")
    rig.write(DATA, garbage, b"garbage")
    rig.write(DATA, "README", b"of someone else")
    way = bytes(20 << 20)
    gate = Gate(way, b"the end")
    saving = asyncio.create_task(store.put("b", 0, gate, Description()))
    async with asyncio.timeout(LIMIT):
        await gate.reached.wait()
        assert await store.sweep(grace=3600) == 0
        assert await store.sweep(grace=-3600) == 1
        gate.open.set()
        await saving
    assert garbage not in rig.keys(DATA)
    assert rig.read(DATA, "README") == b"of someone else"
    assert await content(store, "a") == b"kept"
    assert await content(store, "b") == way + b"the end"


async def test_a_sweep_spares_data_that_is_whole_before_its_entry_is(rig: Rig) -> None:
    class Sweeping(Objects):
        async def upload(self, folder: str, key: str, feed: Feed, size: int) -> None:
            await super().upload(folder, key, feed, size)
            assert await store.sweep(grace=-3600) == 0

    store = rig.store(kind=Sweeping)
    await put(store, "a", b"data")
    assert await content(store, "a") == b"data"


# Damage


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda entry: entry[:-1],
    "empty": lambda entry: b"",
    "no JSON": lambda entry: b"\xff" + entry,
    "no object": lambda entry: b"[]",
    "another format": lambda entry: entry.replace(b'"format":1', b'"format":2'),
    "another name": lambda entry: entry.replace(b'"name":"a"', b'"name":"z"'),
    "outside": lambda entry: entry.replace(b'"data":"', b'"data":"../../'),
    "a digest of nothing": lambda entry: entry.replace(b"blake3:", b"md5:"),
    "no size": lambda entry: entry.replace(b'"bytes":4', b'"bytes":-4'),
    "a size that is no number": lambda entry: entry.replace(b'"bytes":4', b'"bytes":true'),
    "never": lambda entry: entry.replace(b'"created":', b'"created":1e99,"was":'),
    "not a number": lambda entry: entry.replace(b'"created":', b'"created":NaN,"was":'),
    "too deep": lambda entry: b"[" * 30_000,
    "too large": lambda entry: entry + b" " * MAX_ENTRY,
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_entry_is_told_left_out_and_can_be_replaced_or_deleted(rig: Rig, damage: str) -> None:
    store = rig.store()
    await put(store, "a", b"data")
    await put(store, "b", b"data")
    changed = DAMAGE[damage](rig.read(ENTRIES, "a"))
    assert changed != rig.read(ENTRIES, "a")
    rig.write(ENTRIES, "a", changed)
    with nothing_changes(rig):
        for call in (store.get, store.info):
            with pytest.raises(DataLoss, match="snapshot a is damaged: its entry"):
                await call("a")
        with pytest.raises(DataLoss, match="snapshot a is damaged: its entry"):
            await store.sweep(grace=-1)
        with pytest.raises(Conflict):
            await put(store, "a")
        assert await names(store) == ["b"]
    await put(store, "a", b"new", overwrite=True)
    assert await content(store, "a") == b"new"
    assert await store.sweep(grace=-1) == 1  # the data of the damaged one
    rig.write(ENTRIES, "a", changed)
    await store.delete("a")
    with pytest.raises(NotFound):
        await store.info("a")


@pytest.mark.parametrize("size", [1, CHUNK, 5 * CHUNK + 5])
@pytest.mark.parametrize("damage", ["first", "last", "cut", "more", "none"])
async def test_damaged_data_is_an_error_before_the_last_chunk(rig: Rig, size: int, damage: str) -> None:
    store, data = rig.store(), bytearray(os.urandom(size))
    await put(store, "a", bytes(data))
    match damage:
        case "first":
            data[0] ^= 1
        case "last":
            data[-1] ^= 128
        case "cut":
            del data[-1:]
        case "more":
            data += b"x"
        case _:
            data.clear()
    rig.write(DATA, rig.data_of("a"), bytes(data))
    read: list[bytes] = []
    with pytest.raises(DataLoss, match="snapshot a is damaged"):
        await read_into(read, store, "a")
    assert sum(map(len, read)) < size
    assert (await store.info("a")).bytes == size


async def test_data_that_is_missing_is_told_when_it_is_asked_for(rig: Rig) -> None:
    store = rig.store()
    await put(store, "a")
    obstore.delete(rig.raw, f"{DATA}/{rig.data_of('a')}")
    with pytest.raises(DataLoss, match="snapshot a is damaged: its data is missing"):
        await store.get("a")
    await store.delete("a")


# Limits


class Counting(Objects):
    """Fails the test where data is read."""

    async def open(self, folder: str, key: str) -> Source | None:
        assert folder != DATA
        return await super().open(folder, key)


async def at_once(store: SnapshotStore, sizes: dict[str, int], *, hint: bool = True) -> list[object]:
    """Puts them so that all are on their way, or refused, before one ends."""
    gates = {name: Gate(bytes(size // 2), bytes(size - size // 2)) for name, size in sizes.items()}
    puts = {
        name: asyncio.create_task(store.put(name, sizes[name] if hint else 0, gate, Description(), overwrite=True))
        for name, gate in gates.items()
    }
    async with asyncio.timeout(LIMIT):
        for name, gate in gates.items():
            reached = asyncio.create_task(gate.reached.wait())
            await asyncio.wait({puts[name], reached}, return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
        for gate in gates.values():
            gate.open.set()
        return await asyncio.gather(*puts.values(), return_exceptions=True)


@pytest.mark.parametrize("hint", [True, False])
async def test_puts_at_once_keep_the_total(rig: Rig, hint: bool) -> None:
    store = rig.store(StoreLimits(total_bytes=1000), Counting)
    await put(store, "old", bytes(100))
    results = await at_once(store, {f"n{number}": 300 for number in range(6)}, hint=hint)
    refused = [result for result in results if isinstance(result, Exhausted)]
    # without sizes all are let in, and one that finds no room may be in the way of another while it goes
    assert len(refused) == 3 if hint else 3 <= len(refused) < 6
    assert len(refused) + sum(isinstance(result, SnapshotInfo) for result in results) == 6
    assert all(error.reason == "STORE_FULL" and error.metadata["limit"] == "1000" for error in refused)
    assert "exceed the limit of 1000" in refused[0].message
    kept = sum(len(rig.read(DATA, key)) for key in rig.keys(DATA))
    assert kept == 1000 if hint else kept <= 1000
    with pytest.raises(Exhausted, match=f"has {kept} bytes; with 901 more they exceed the limit of 1000"):
        await put(store, "one", bytes(901))
    await store.delete("old")
    await put(store, "one", bytes(100))


async def test_puts_at_once_keep_the_count(rig: Rig) -> None:
    store = rig.store(StoreLimits(snapshots=3), Counting)
    results = await at_once(store, {f"n{number}": 10 for number in range(6)})
    refused = [result for result in results if isinstance(result, Exhausted)]
    assert len(refused) == 3
    assert refused[0].reason == "SNAPSHOTS_FULL"
    assert refused[0].message == "the store has 3 snapshots; the limit is 3"
    kept = await names(store)
    assert len(kept) == 3
    await put(store, kept[0], b"replaced", overwrite=True)
    await store.delete(kept[0])
    await put(store, "another")


@pytest.mark.parametrize("hint", [0, 50, 101])
async def test_one_that_is_too_large_is_refused_whatever_it_announced(rig: Rig, hint: int) -> None:
    store = rig.store(StoreLimits(snapshot_bytes=100))
    await put(store, "fits", bytes(100))
    with nothing_changes(rig), pytest.raises(Exhausted, match="has 101 bytes; the limit for one is 100") as caught:
        await store.put("a", hint, given_pieces(bytes(60), bytes(41)), Description())
    assert caught.value.reason == "SNAPSHOT_TOO_LARGE"


async def test_what_is_replaced_does_not_count_twice(rig: Rig) -> None:
    store = rig.store(StoreLimits(total_bytes=1000))
    await put(store, "a", bytes(900))
    await put(store, "a", bytes(1000), overwrite=True)
    with nothing_changes(rig), pytest.raises(Exhausted):
        await put(store, "a", bytes(1001), overwrite=True)
    await put(store, "a", bytes(10), overwrite=True)
    await put(store, "b", bytes(990))


async def test_data_that_is_whole_before_its_entry_is_does_not_count_twice(rig: Rig) -> None:
    class Crowded(Objects):
        first = True

        async def upload(self, folder: str, key: str, feed: Feed, size: int) -> None:
            await super().upload(folder, key, feed, size)
            if self.first:
                self.first = False
                await put(store, "b", bytes(400))
                with pytest.raises(Exhausted, match="has 1000 bytes"):
                    await put(store, "c", bytes(1))

    store = rig.store(StoreLimits(total_bytes=1000), Crowded)
    await put(store, "a", bytes(600))
    assert await names(store) == ["a", "b"]


async def test_room_that_a_failed_put_had_is_free_again(rig: Rig) -> None:
    store = rig.store(StoreLimits(total_bytes=1000, snapshots=1))
    for _ in range(3):
        with pytest.raises(OverflowError):
            await store.put("a", 900, broken_pieces(bytes(500)), Description())
    await put(store, "b", bytes(1000))


async def test_an_announced_size_that_was_too_large_is_given_back(rig: Rig) -> None:
    store = rig.store(StoreLimits(total_bytes=1000))
    await store.put("a", 900, given_pieces(b"x"), Description())
    await put(store, "b", bytes(999))


# The directory


def outside(tmp_path: Path) -> Path:
    secret = tmp_path / "secret"
    secret.write_text("of someone else")
    return secret


@pytest.mark.parametrize("kind", ["file", "dangling", "directory", "pipe"])
async def test_an_entry_that_is_no_file_is_not_used(local: Rig, tmp_path: Path, kind: str) -> None:
    assert local.root is not None
    store, secret = local.store(), outside(tmp_path)
    await put(store, "b")
    planted = local.root / ENTRIES / "a"
    match kind:
        case "file":
            planted.symlink_to(secret)
        case "dangling":
            planted.symlink_to(tmp_path / "made by following")
        case "directory":
            planted.symlink_to(tmp_path, target_is_directory=True)
        case _:
            os.mkfifo(planted)
    async with asyncio.timeout(LIMIT):
        for call in (store.get, store.info, store.delete):
            with pytest.raises(Unavailable, match="snapshots/a is no file") as caught:
                await call("a")
            assert caught.value.reason == "STORE_UNSAFE"
        for overwrite in (False, True):
            with pytest.raises(Unavailable, match="snapshots/a is no file"):
                await put(store, "a", overwrite=overwrite)
        assert await names(store) == ["b"]
        assert await store.sweep(grace=-1) == 0
    assert secret.read_text() == "of someone else"
    assert not (tmp_path / "made by following").exists()
    assert planted.is_symlink() or planted.is_fifo()


async def test_data_that_is_a_link_is_not_followed(local: Rig, tmp_path: Path) -> None:
    assert local.root is not None
    store, secret = local.store(), outside(tmp_path)
    await put(store, "a", secret.read_bytes())
    data = local.root / DATA / local.data_of("a")
    data.unlink()
    data.symlink_to(secret)
    with pytest.raises(Unavailable, match=f"{DATA}/{data.name} is no file"):
        await store.get("a")
    limited = local.store(StoreLimits(total_bytes=5))
    await put(limited, "b")  # nor counted
    assert secret.exists()


@pytest.mark.parametrize("folder", [ENTRIES, DATA])
async def test_a_folder_that_became_a_link_is_not_followed(local: Rig, tmp_path: Path, folder: str) -> None:
    assert local.root is not None
    store = local.store()
    await put(store, "a")
    elsewhere = tmp_path / "elsewhere"
    (local.root / folder).rename(elsewhere)
    (local.root / folder).symlink_to(elsewhere)
    before = sorted(os.listdir(elsewhere))
    for call in (put(store, "b"), content(store, "a"), store.sweep(), put(store, "a", overwrite=True)):
        with pytest.raises(Unavailable, match=f"{folder} is no directory"):
            await call
    assert sorted(os.listdir(elsewhere)) == before
    with pytest.raises(ConfigError, match=f"{folder} in it is no directory"):
        local.store()


async def test_only_the_owner_may_look_in(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store(str(tmp_path / "deep" / "store"))
        await put(store, "a/b", bytes(20 << 20))
        await put(store, "a/b", b"x", overwrite=True)
    finally:
        os.umask(before)
    root = tmp_path / "deep" / "store"
    modes = {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    assert len(modes) == 5
    assert {mode for name, mode in modes.items() if (root / name).is_dir()} == {0o700}
    assert {mode for name, mode in modes.items() if (root / name).is_file()} == {0o600}


def test_a_directory_that_is_there_keeps_its_permissions_and_what_is_ours_in_it_gets_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / DATA).mkdir(mode=0o755)
    open_store(str(tmp_path))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert {stat.S_IMODE((tmp_path / folder).stat().st_mode) for folder in (ENTRIES, DATA)} == {0o700}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_directory_without_permission_is_a_clear_error(local: Rig) -> None:
    assert local.root is not None
    store = local.store()
    await put(store, "a")
    for folder in (ENTRIES, DATA):
        (local.root / folder).chmod(0o500)
        with pytest.raises(Unavailable, match="denies access") as caught:
            await put(store, "b")
        assert caught.value.retry_after is None
        assert await names(store) == ["a"]
        (local.root / folder).chmod(0o700)


@pytest.mark.parametrize("folder", [ENTRIES, DATA])
@pytest.mark.parametrize("instead", ["file", "nothing"])
async def test_a_folder_that_is_gone_is_a_clear_error(local: Rig, folder: str, instead: str) -> None:
    assert local.root is not None
    store = local.store()
    (local.root / folder).rmdir()
    if instead == "file":
        (local.root / folder).write_text("")
    for call in (put(store, "a"), store.sweep()):
        with pytest.raises(Unavailable, match=f"{folder} is no directory"):
            await call
    assert os.listdir(local.root) != []


async def test_a_disk_without_room_is_exhausted_and_nothing_stays(local: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A file may have 1 MiB here, which the system tells in the way in which it tells of a full disk."""
    store = local.store()
    await put(store, "a", b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with nothing_changes(local):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(Exhausted, match="store is full") as caught:
                await store.put("a", 0, given_pieces(*[bytes(1 << 20)] * 40), Description(), overwrite=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.reason == "STORE_FULL"
    assert str(local.root) not in caught.value.message
    assert any("os error 27" in record.message for record in caplog.records)


async def test_a_store_that_hangs_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of obstore ever answers."""

    def never(*_: object, **__: object) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    rig.objects()
    for name in ("put_async", "get_async", "delete_async", "list_with_delimiter_async"):
        monkeypatch.setattr(obstore, name, never)
    objects = rig.objects()
    objects._patience = 0.05
    released = threading.Event()
    if rig.root is not None:
        monkeypatch.setattr(os, "read", lambda *_: released.wait(LIMIT) and b"")
        rig.write(ENTRIES, "slow", b"")
    async with asyncio.timeout(LIMIT):
        for call in (
            objects.upload(DATA, "k", Feed(), 0),
            objects.replace(ENTRIES, "k", b""),
            objects.read(ENTRIES, "slow", 1),
            objects.delete(ENTRIES, "k"),
            objects.found(ENTRIES),
            put(SnapshotStore(objects, StoreLimits()), "a"),
        ):
            with pytest.raises(Unavailable, match="does not answer") as caught:
                await call
            assert caught.value.retry_after
    released.set()


# Where a store is


@pytest.mark.parametrize(
    "url", ["", "http://host/x", "gs://bucket", "s3://", "s3:///x", "s3://key@bucket/x", "s3://b:1/", "file://host/x", "file:///"]
)  # fmt: skip
def test_a_place_that_can_be_no_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        open_store(url)


@pytest.mark.parametrize("below", ["", "/store"])
def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*file"):
        open_store(str(tmp_path / "file") + below)


async def test_a_directory_can_be_a_url_and_a_link_of_the_operator(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a b")
    (tmp_path / "a b").mkdir()
    await put(open_store(f"file://{tmp_path}/a%20b"), "a")
    assert await names(open_store(str(tmp_path / "link"))) == ["a"]


async def test_memory_is_new_each_time() -> None:
    await put(open_store("memory:"), "a")
    assert await names(open_store("memory:")) == []


def test_keys_do_not_show_in_what_is_printed() -> None:
    from service.state.location import StoreOptions

    options = StoreOptions(access_key_id="AKIA", secret_access_key="hush", session_token="token")
    assert not any(secret in repr(options) for secret in ("AKIA", "hush", "token="))
