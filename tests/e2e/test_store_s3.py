"""Snapshots in S3: a moto server as a process of its own, which also dies and stalls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from service.errors import Conflict, Exhausted, NotFound, Unavailable
from service.state.integrity import digest_of
from service.state.location import StoreOptions
from service.state.room import StoreLimits
from service.state.snapshot import Description, SnapshotInfo
from service.state.store import SnapshotStore, open_store
from tests.conftest import LIMIT

MIB = 1 << 20


class S3:
    """A server on a port of its own."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = free.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.address[1])]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self._wait(log)

    def _wait(self, log: Path) -> None:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(self.address, 0.1):
                return
        self.stop()
        raise AssertionError(f"moto did not start: {log.read_text()}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT)

    def ask(self, method: str, path: str) -> str:
        request = urllib.request.Request(f"{self.url}/{path}", method=method)
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return str(answer.read().decode())

    def bucket(self, name: str) -> str:
        self.ask("PUT", name)
        return name

    def objects(self, bucket: str) -> dict[str, str]:
        """By key, the tags that the server gave them; one of an upload in n parts ends with -n."""
        listed = self.ask("GET", f"{bucket}?list-type=2")
        return dict(re.findall(r"<Key>(.*?)</Key>.*?<ETag>\"?(?:&quot;)?(.*?)(?:&quot;)?\"?</ETag>", listed, re.DOTALL))

    def uploads(self, bucket: str) -> list[str]:
        return re.findall(r"<Upload>.*?<Key>(.*?)</Key>", self.ask("GET", f"{bucket}?uploads"), re.DOTALL)

    def options(self, *, timeout: float = 10.0, conditional_put: bool = True, retries: int = 2) -> StoreOptions:
        return StoreOptions(
            endpoint=self.url,
            region="us-east-1",
            access_key_id="key",
            secret_access_key="secret",
            conditional_put=conditional_put,
            timeout=timeout,
            retries=retries,
            connect_timeout=timeout,
        )


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    server = S3(tmp_path_factory.mktemp("moto") / "log")
    yield server
    server.stop()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[S3]:
    """A server of this test alone."""
    server = S3(tmp_path / "log")
    yield server
    server.stop()


@pytest.fixture
def bucket(s3: S3) -> str:
    return s3.bucket(f"b{uuid.uuid4().hex}")


def large() -> bytes:
    return os.urandom(20 * MIB + 5)


async def pieces(data: bytes, size: int = MIB) -> AsyncIterator[memoryview]:
    for start in range(0, len(data), size):
        yield memoryview(data)[start : start + size]


async def put(store: SnapshotStore, name: str, data: bytes = b"state", *, overwrite: bool = False) -> SnapshotInfo:
    return await store.put(name, len(data), pieces(data), Description(metadata={"of": name}), overwrite=overwrite)


async def content(store: SnapshotStore, name: str) -> bytes:
    _, chunks = await store.get(name)
    return b"".join([chunk async for chunk in chunks])


async def test_snapshots_are_put_read_listed_replaced_and_deleted(s3: S3, bucket: str) -> None:
    store, data = open_store(f"s3://{bucket}/of/us", s3.options()), large()
    async with asyncio.timeout(LIMIT):
        info = await put(store, "chat/a", data)
        assert info.digest == digest_of([data])
        (tag,) = [tag for key, tag in s3.objects(bucket).items() if key.startswith("of/us/data/")]
        assert tag.endswith("-3")  # 8 MiB each
        again = open_store(f"s3://{bucket}/of/us/", s3.options())
        assert await again.info("chat/a") == info
        assert await content(again, "chat/a") == data
        for name in ("b", "chat", "chat/b"):
            await put(store, name)
        page = await again.list("", 3)
        assert [item.name for item in page.snapshots] == ["b", "chat", "chat/a"]
        assert [item.name for item in (await again.list("", 3, page.next_token)).snapshots] == ["chat/b"]
        with pytest.raises(Conflict, match="chat/a"):
            await put(again, "chat/a")
        await put(again, "chat/a", b"", overwrite=True)
        assert await content(store, "chat/a") == b""
        for name in ("b", "chat", "chat/b", "chat/a"):
            await store.delete(name)
        with pytest.raises(NotFound):
            await store.delete("chat/a")
    assert s3.objects(bucket) == {}
    assert s3.uploads(bucket) == []
    assert (await open_store(f"s3://{bucket}", s3.options()).list()).snapshots == ()


@pytest.mark.parametrize("conditional", [True, False])
async def test_of_many_that_take_a_name_at_once_one_gets_it_where_the_store_can_tell(
    s3: S3, bucket: str, conditional: bool
) -> None:
    stores = [open_store(f"s3://{bucket}", s3.options(conditional_put=conditional)) for _ in range(4)]
    async with asyncio.timeout(LIMIT):
        results = await asyncio.gather(*(put(store, "a") for store in stores), return_exceptions=True)
        won = [result for result in results if isinstance(result, SnapshotInfo)]
        assert all(isinstance(result, Conflict | SnapshotInfo) for result in results)
        assert len(won) == 1 if conditional else len(won) >= 1
        with pytest.raises(Conflict):
            await put(stores[0], "a")
        assert await content(stores[1], "a") == b"state"
        if conditional:
            assert len(s3.objects(bucket)) == 2


@pytest.mark.parametrize("end", ["cancelled", "failed", "too large"])
async def test_an_upload_that_breaks_off_is_aborted(s3: S3, bucket: str, end: str) -> None:
    store = open_store(f"s3://{bucket}", s3.options(), StoreLimits(snapshot_bytes=30 * MIB))
    under_way, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(MIB)
        under_way.set()
        await go_on.wait()
        if end == "failed":
            raise OverflowError
        for _ in range(11):
            yield bytes(MIB)

    async with asyncio.timeout(LIMIT):
        task = asyncio.create_task(store.put("a", 0, slow(), Description()))
        await under_way.wait()
        assert len(s3.uploads(bucket)) == 1
        if end == "cancelled":
            task.cancel()
        go_on.set()
        error = {"cancelled": asyncio.CancelledError, "failed": OverflowError, "too large": Exhausted}[end]
        with pytest.raises(error):
            await task
    assert s3.uploads(bucket) == []
    assert s3.objects(bucket) == {}


async def test_limits_count_what_is_in_the_bucket(s3: S3, bucket: str) -> None:
    limits = StoreLimits(total_bytes=1000, snapshots=2)
    store, other = (open_store(f"s3://{bucket}", s3.options(), limits) for _ in range(2))
    await put(store, "a", bytes(900))
    with pytest.raises(Exhausted, match="has 900 bytes; with 101 more"):
        await put(other, "b", bytes(101))
    await put(other, "b", bytes(100))
    with pytest.raises(Exhausted, match="has 2 snapshots"):
        await put(store, "c", b"")


async def test_a_sweep_removes_data_without_entry(s3: S3, bucket: str) -> None:
    store = open_store(f"s3://{bucket}/p", s3.options())
    await put(store, "a")
    s3.ask("PUT", f"{bucket}/p/data/{'0' * 32}")
    assert await store.sweep() == 0
    assert await store.sweep(grace=-60) == 1
    assert await content(store, "a") == b"state"
    assert len(s3.objects(bucket)) == 2


async def test_the_environment_says_what_the_options_do_not(
    s3: S3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": s3.url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{bucket}")
    async with asyncio.timeout(LIMIT):
        await put(store, "a")
        assert await content(store, "a") == b"state"


async def test_a_bucket_that_does_not_exist_is_a_clear_error(s3: S3) -> None:
    store = open_store("s3://nowhere", s3.options())
    async with asyncio.timeout(LIMIT):
        for call in (put(store, "a"), store.info("a"), store.list(), store.delete("a"), store.sweep()):
            with pytest.raises(Unavailable, match="bucket of the snapshot store does not exist"):
                await call


async def rest(chunks: AsyncIterator[bytes], size: int) -> None:
    async for chunk in chunks:
        size -= len(chunk)
        assert size > 0


def check_unavailable(error: Unavailable, server: S3) -> None:
    assert error.reason == "STORE_UNAVAILABLE"
    assert error.message == "the snapshot store cannot be used: it does not answer"
    assert error.retry_after
    assert server.url not in error.message


async def test_a_server_that_dies_in_the_middle_of_a_put_is_a_clear_error(mortal: S3) -> None:
    store = open_store(f"s3://{mortal.bucket('bucket')}", mortal.options())

    async def deadly() -> AsyncIterator[bytes]:
        for number in range(100):
            if number == 20:
                assert len(mortal.uploads("bucket")) == 1
                mortal.stop()
            yield bytes(MIB)

    async with asyncio.timeout(LIMIT):
        with pytest.raises(Unavailable) as caught:
            await store.put("a", 100 * MIB, deadly(), Description())
        check_unavailable(caught.value, mortal)
        for call in (put(store, "a"), store.info("a"), store.get("a"), store.list(), store.delete("a"), store.sweep()):
            with pytest.raises(Unavailable) as caught:
                await call
            check_unavailable(caught.value, mortal)


@pytest.mark.parametrize("end", ["dies", "stalls"])
async def test_a_server_that_dies_or_stalls_in_the_middle_of_a_get_is_a_clear_error(mortal: S3, end: str) -> None:
    patient = open_store(f"s3://{mortal.bucket('bucket')}", mortal.options())
    store = open_store("s3://bucket", mortal.options(timeout=1.0, retries=1))
    async with asyncio.timeout(LIMIT):
        await put(patient, "a", bytes(64 * MIB))
        _, chunks = await store.get("a")
        read = len(await anext(chunks))
        mortal.process.send_signal(signal.SIGKILL if end == "dies" else signal.SIGSTOP)
        with pytest.raises(Unavailable) as caught:
            await rest(chunks, 64 * MIB - read)
        check_unavailable(caught.value, mortal)


async def test_a_server_that_stalls_is_given_up(mortal: S3) -> None:
    store = open_store(f"s3://{mortal.bucket('bucket')}", mortal.options(timeout=0.3, retries=1))
    mortal.process.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(LIMIT):
        for call in (put(store, "a"), store.info("a"), store.get("a"), store.list(), store.delete("a"), store.sweep()):
            with pytest.raises(Unavailable) as caught:
                await call
            check_unavailable(caught.value, mortal)
        mortal.process.send_signal(signal.SIGCONT)
        patient = open_store("s3://bucket", mortal.options())
        await put(patient, "a")
        assert await content(patient, "a") == b"state"


async def test_a_server_that_stalls_in_the_middle_of_a_put_is_given_up(mortal: S3) -> None:
    store = open_store(f"s3://{mortal.bucket('bucket')}", mortal.options(timeout=0.3, retries=1))

    async def stalling() -> AsyncIterator[bytes]:
        for number in range(100):
            if number == 20:
                mortal.process.send_signal(signal.SIGSTOP)
            yield bytes(MIB)

    async with asyncio.timeout(LIMIT):
        with pytest.raises(Unavailable) as caught:
            await store.put("a", 100 * MIB, stalling(), Description())
        check_unavailable(caught.value, mortal)
        mortal.process.send_signal(signal.SIGCONT)
        assert (await open_store("s3://bucket", mortal.options()).list()).snapshots == ()
