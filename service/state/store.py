"""Snapshots: slot images by name.

snapshots/<name, '/' as '='>   one entry each: a JSON object (`snapshot`), which names the data
data/<32 hexadecimal digits>   the bytes of an image as they came

Data is written first, under a key that was never used, and then the entry, in one piece: that moment the snapshot is
there, or another than before. Data that no entry names is left over from a writer that broke off; a sweep removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from dataclasses import dataclass, field

from service.errors import FieldViolation, InvalidRequest, SlotwireError, Unavailable
from service.state.entries import Entries, already_there, not_found
from service.state.integrity import Digest, digest_name
from service.state.location import StoreOptions, open_objects
from service.state.names import check_name, check_prefix, last_name, page_token
from service.state.objects import DATA, Abandoned, Feed, Objects, Source
from service.state.room import Reservation, Room, Stored, StoreLimits
from service.state.sections import Bytes
from service.state.snapshot import Description, Entry, SnapshotInfo, damaged, is_data_key

log = logging.getLogger("slotwire.state")

MAX_PAGE = 1000
DEFAULT_PAGE = 100
GRACE = 86_400.0
"""Seconds. A writer takes less between the first byte and the entry."""

_PIECE = 1 << 20
_GROWTH = 64 << 20
"""Bytes that are reserved at once for data that is larger than was announced."""


@dataclass(frozen=True, slots=True)
class Page:
    """Snapshots by name, and the token of the next page; empty where there is none."""

    snapshots: tuple[SnapshotInfo, ...]
    next_token: str = ""


@dataclass(slots=True, eq=False)
class _Saving:
    """A snapshot on its way into the store."""

    name: str
    description: Description
    overwrite: bool
    reservation: Reservation
    feed: Feed = field(default_factory=Feed)
    digest: Digest = field(default_factory=Digest)
    size: int = 0

    def entry(self, created: float) -> Entry:
        info = SnapshotInfo(
            name=self.name,
            bytes=self.size,
            created=created,
            digest=self.digest.text(),
            tokens=self.description.tokens,
            model=self.description.model,
            fingerprint=self.description.fingerprint,
            metadata=self.description.metadata,
        )
        return Entry(info, self.reservation.data)


def open_store(url: str, options: StoreOptions | None = None, limits: StoreLimits | None = None) -> SnapshotStore:
    """The store at a directory, given as a path or "file:///path", at "memory:", or at "s3://bucket/prefix".

    A directory is made where it is missing; S3 is not asked yet. Raises ConfigError where it cannot be.
    """
    return SnapshotStore(open_objects(url, options or StoreOptions()), limits or StoreLimits())


class SnapshotStore:
    """For one event loop. Others may use the same place at the same time, but limits are kept among the writers of one
    store only.

    Everything here raises InvalidRequest for a name that can be none, Unavailable where the store does not work, and
    Exhausted where its disk is full. `clock` gives seconds since the epoch.
    """

    def __init__(self, objects: Objects, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        self.limits = limits
        self._objects = objects
        self._entries = Entries(objects)
        self._clock = clock
        self._room = Room(limits, self._stored)
        self._writers: set[asyncio.Task[SnapshotInfo]] = set()

    async def put(
        self,
        name: str,
        size_hint: int,
        pieces: AsyncIterable[Bytes],
        description: Description,
        *,
        overwrite: bool = False,
    ) -> SnapshotInfo:
        """Keeps what `pieces` give, about `size_hint` bytes, under a name. A piece may change once the next is asked
        for. Whatever goes wrong, a cancellation too, the store stays as it was.

        Raises Conflict where there is such a snapshot and `overwrite` is not set, Exhausted beyond a limit,
        InvalidRequest for a description that cannot be kept, and what `pieces` raise.
        """
        check_name(name)
        description.check()
        saving = await self._begin(name, max(size_hint, 0), description, overwrite)
        writer = self._start(saving)
        try:
            async for piece in pieces:
                await self._feed(saving, piece)
                if writer.done():
                    break
            await saving.feed.put(None)
            return await asyncio.shield(writer)
        except BaseException:
            saving.feed.abandon()
            await asyncio.wait({writer})
            raise

    async def get(self, name: str) -> tuple[SnapshotInfo, AsyncGenerator[bytes, None]]:
        """A snapshot and its bytes, which go on coming when it is replaced or deleted. Close the generator.

        Raises NotFound, or DataLoss where its entry is damaged, or its data is missing or of another size. The
        generator raises DataLoss where the bytes are not those that were saved, before it gives the last of them.
        """
        missing = ""
        while True:
            entry = await self._entries.get(name)
            if entry.data == missing:
                raise damaged(name, "its data is missing")
            source = await self._objects.open(DATA, entry.data)
            if source is None:
                missing = entry.data  # unless another one took its place
                continue
            if source.size != entry.info.bytes:
                raise damaged(name, f"it has {source.size} bytes, not {entry.info.bytes}")
            return entry.info, self._checked(entry.info, source)

    async def info(self, name: str) -> SnapshotInfo:
        """Raises NotFound, or DataLoss where its entry is damaged."""
        return (await self._entries.get(name)).info

    async def list(self, prefix: str = "", page_size: int = 0, token: str = "") -> Page:
        """The next snapshots whose names begin with `prefix`, by name; 0 is DEFAULT_PAGE. `token` is that of the page
        before. What is put and deleted between two pages changes nothing else; a page may have fewer snapshots than
        asked for, also where others follow. Damaged ones are left out.

        Raises InvalidRequest for a bad prefix, size or token.
        """
        check_prefix(prefix)
        if not 0 <= page_size <= MAX_PAGE:
            raise InvalidRequest(FieldViolation("page_size", f"must be 0 to {MAX_PAGE}"))
        size, last = page_size or DEFAULT_PAGE, last_name(token, prefix)
        rest = [name for name in await self._entries.names() if name.startswith(prefix) and name > last]
        names = heapq.nsmallest(size, rest)
        found = tuple(entry.info for entry in await self._entries.all(names))
        return Page(found, page_token(prefix, names[-1]) if len(rest) > size else "")

    async def delete(self, name: str) -> None:
        """Also a snapshot that is damaged. Raises NotFound."""
        check_name(name)
        async with self._entries.lock(name):
            exists, data = await self._entries.current(name)
            if not exists:
                raise not_found(name)
            await self._entries.remove(name)
            if data:
                await self._discard(data)

    async def sweep(self, grace: float = GRACE) -> int:
        """Removes what was left over more than `grace` seconds ago, and returns how many objects that were.

        Parts of uploads that a killed process left in S3 are not seen here; give the bucket a lifecycle rule for those.
        Raises DataLoss where an entry cannot be read, and removes nothing then: its data may be any.
        """
        before = self._clock() - grace
        old = {found.key for found in await self._objects.found(DATA) if found.modified < before}
        named = {entry.data for entry in await self._entries.all(await self._entries.names(), strict=True)}
        writing = self._room.on_their_way()
        garbage = [key for key in old - named - writing if is_data_key(key)]
        for key in garbage:
            await self._objects.delete(DATA, key)
        return len(garbage) + await self._objects.remove_leftovers(before, writing)

    async def close(self) -> None:
        """Waits until what callers who were cancelled began has come to its end."""
        if self._writers:
            await asyncio.wait(self._writers)

    async def _begin(self, name: str, size: int, description: Description, overwrite: bool) -> _Saving:
        exists, data = await self._entries.current(name)
        if exists and not overwrite:
            raise already_there(name)
        reservation = Reservation(name, secrets.token_hex(16), size, replaces=data)
        await self._room.reserve(reservation)
        return _Saving(name, description, overwrite, reservation)

    def _start(self, saving: _Saving) -> asyncio.Task[SnapshotInfo]:
        """A task that goes on when the one who waits for it is cancelled."""
        writer = asyncio.create_task(self._write(saving))
        self._writers.add(writer)
        writer.add_done_callback(self._writers.discard)
        writer.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may have waited for it
        return writer

    async def _feed(self, saving: _Saving, piece: Bytes) -> None:
        for part in _parts(piece):
            if saving.feed.abandoned:
                return
            saving.size += len(part)
            if saving.size > saving.reservation.size:
                await self._room.grow(saving.reservation, saving.size, _GROWTH)
            saving.digest.update(part)
            await saving.feed.put(part)

    async def _write(self, saving: _Saving) -> SnapshotInfo:
        name, data = saving.name, saving.reservation.data
        try:
            async with self._discarding(data) as undo:
                await self._objects.upload(DATA, data, saving.feed, saving.reservation.size)
                async with self._entries.lock(name):
                    exists, replaced = await self._entries.current(name)
                    if exists and not saving.overwrite:
                        raise already_there(name)
                    if saving.feed.abandoned:
                        raise Abandoned
                    undo.pop_all()  # where it is not certain whether the entry was written, the data stays
                    entry = saving.entry(self._clock())
                    if not await self._entries.write(entry, overwrite=saving.overwrite):
                        await self._discard(data)
                        raise already_there(name)
                    if replaced:
                        await self._discard(replaced)
                    return entry.info
        finally:
            self._room.release(saving.reservation)
            saving.feed.abandon()  # lets go who fills it

    @contextlib.asynccontextmanager
    async def _discarding(self, data: str) -> AsyncGenerator[contextlib.AsyncExitStack, None]:
        """Removes data that comes to nothing. From a store that does not answer a sweep will."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._discard, data)
            try:
                yield undo
            except Unavailable:
                undo.pop_all()
                raise

    async def _discard(self, data: str) -> None:
        try:
            await self._objects.delete(DATA, data)
        except SlotwireError as error:
            log.warning("snapshot data %s is left for a sweep: %s", data, error.message)

    async def _checked(self, info: SnapshotInfo, source: Source) -> AsyncGenerator[bytes, None]:
        digest, held = Digest(digest_name(info.digest)), b""
        async with contextlib.aclosing(self._objects.stream(source)) as chunks:
            async for chunk in chunks:
                digest.update(chunk)
                if held:
                    yield held
                held = chunk
        if digest.text() != info.digest:
            raise damaged(info.name, f"its digest is {digest.text()}, not {info.digest}")
        if held:
            yield held

    async def _stored(self) -> Stored:
        sizes = {found.key: found.size for found in await self._objects.found(DATA)}
        return Stored(frozenset(await self._entries.names()), sizes)


def _parts(piece: Bytes) -> Iterator[Bytes]:
    """A piece in parts that do not change with it."""
    view = memoryview(piece).cast("B")
    for start in range(0, len(view), _PIECE):
        part = view[start : start + _PIECE]
        yield part if isinstance(piece, bytes) else bytes(part)
