"""The objects that a store is made of: whole ones, by folder and key.

They are obstore's (https://developmentseed.org/obstore), whose errors become ours here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError

from service.errors import Exhausted, SlotwireError, Unavailable
from service.state.sections import Bytes

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger("slotwire.state")

ENTRIES, DATA = FOLDERS = ("snapshots", "data")

RETRY_AFTER = 5.0
CHUNK = 1 << 20
"""Bytes of a piece that is read, at least, but for the last one."""

_PART = 8 << 20
_PARTS_AT_ONCE = 4
_MOST_PARTS = 9_000
"""S3 takes 10,000."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """An object: its key, its size in bytes, and when it was written, in seconds since the epoch."""

    key: str
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class Source:
    """An object that was opened: its size in bytes, and what reads the next CHUNK of it or more, nothing at the end."""

    size: int
    read: Callable[[], Awaitable[bytes]]


class Abandoned(Exception):
    """Ends an upload of which nothing shall stay."""


class Feed:
    """What an upload takes its pieces from. One piece waits here at most, and does not change until it was taken.

    A time limit runs while the upload has something to do, and not while it waits for the next piece.
    """

    def __init__(self) -> None:
        self.abandoned = False
        self._piece: Bytes | None = None
        self._given = asyncio.Event()
        self._taken = asyncio.Event()
        self._taken.set()
        self._limit: asyncio.Timeout | None = None
        self._patience = 0.0

    async def put(self, piece: Bytes | None) -> None:
        """Waits until the piece before was taken, or nobody wants any more. None is the end."""
        await self._taken.wait()
        if not self.abandoned:
            self._piece = piece
            self._taken.clear()
            self._given.set()

    def abandon(self) -> None:
        """Ends the upload where it still goes on, and lets go who waits in `put`."""
        self.abandoned = True
        self._given.set()
        self._taken.set()

    def timed(self, limit: asyncio.Timeout, patience: float) -> Feed:
        """Itself, with the limit that it moves on by `patience` seconds for each piece."""
        self._limit, self._patience = limit, patience
        return self

    def __aiter__(self) -> AsyncIterator[Bytes]:
        return self

    async def __anext__(self) -> Bytes:
        self._reschedule(None)
        await self._given.wait()
        piece, self._piece = self._piece, None
        patience = self._patience * (2 if piece is None else 1)  # the last parts, and then the end
        self._reschedule(asyncio.get_running_loop().time() + patience)
        if self.abandoned:
            raise Abandoned
        self._given.clear()
        self._taken.set()
        if piece is None:
            raise StopAsyncIteration
        return piece

    def _reschedule(self, when: float | None) -> None:
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(when)


class Objects:
    """Objects by folder, one of FOLDERS, and key. What the store does not do within `patience` seconds fails.

    Everything here raises Unavailable where the store does not work and Exhausted where it is full.
    """

    def __init__(self, store: ObjectStore, patience: float) -> None:
        self._store = store
        self._patience = patience

    async def create(self, folder: str, key: str, content: bytes) -> bool:
        """False where there is such an object already, which stays; of two at once, one succeeds.

        A store without conditional writes cannot tell of two at once, and both succeed.
        """
        try:
            await self._write(folder, key, content, "create")
        except AlreadyExistsError:
            return False
        except NotImplementedError:
            if await self.open(folder, key) is not None:
                return False
            await self._write(folder, key, content, "overwrite")
        return True

    async def replace(self, folder: str, key: str, content: bytes) -> None:
        """Writes an object in one piece, in the place of one that is there."""
        await self._write(folder, key, content, "overwrite")

    async def upload(self, folder: str, key: str, feed: Feed, size: int) -> None:
        """Writes what the feed gives, about `size` bytes: all of it, or nothing.

        Raises Abandoned where the feed is.
        """
        await self._guard(folder, key)
        try:
            async with asyncio.timeout(self._patience) as limit:
                await obstore.put_async(
                    self._store,
                    f"{folder}/{key}",
                    feed.timed(limit, self._patience),
                    use_multipart=True,
                    chunk_size=max(_PART, -(-size // _MOST_PARTS)),
                    max_concurrency=_PARTS_AT_ONCE,
                )
        except (BaseError, OSError, ValueError) as error:
            raise failure(error) from None
        await self._settle(folder, key)

    async def read(self, folder: str, key: str, most: int) -> bytes | None:
        """The content of an object, cut off somewhere behind its first `most` bytes; None where there is no object."""
        source = await self.open(folder, key)
        if source is None:
            return None
        content = b""
        async with contextlib.aclosing(self.stream(source)) as chunks:
            async for chunk in chunks:
                content += chunk
                if len(content) > most:
                    break
        return content

    async def open(self, folder: str, key: str) -> Source | None:
        """An object as it is now, for `stream`, which reads it also once it is replaced; None where there is none."""
        await self._guard(folder, key)
        try:
            found = await self._call(obstore.get_async(self._store, f"{folder}/{key}"))
        except FileNotFoundError:
            return None
        return Source(found.meta["size"], partial(anext, found.stream(min_chunk_size=CHUNK), b""))

    async def stream(self, source: Source) -> AsyncGenerator[bytes, None]:
        """Chunks of at least CHUNK bytes, but for the last one."""
        while chunk := await self._call(source.read()):
            yield chunk

    async def delete(self, folder: str, key: str) -> None:
        """It is no error where there is no such object."""
        await self._guard(folder, key)
        with contextlib.suppress(FileNotFoundError):
            await self._call(obstore.delete_async(self._store, f"{folder}/{key}"))

    async def found(self, folder: str) -> list[Found]:
        """All objects of a folder, in no order."""
        try:
            result = await self._call(obstore.list_with_delimiter_async(self._store, folder))
        except FileNotFoundError as error:
            raise failure(error) from None
        start = len(folder) + 1
        return [
            Found(item["path"][start:], item["size"], item["last_modified"].timestamp()) for item in result["objects"]
        ]

    async def remove_leftovers(self, before: float, keep: Set[str]) -> int:
        """Removes what writes left that broke off before a time, in seconds since the epoch, and returns how many files
        that were. Writes of the keys to keep still go on.
        """
        return 0

    async def _write(self, folder: str, key: str, content: bytes, mode: Literal["create", "overwrite"]) -> None:
        await self._guard(folder, key)
        try:
            await self._call(obstore.put_async(self._store, f"{folder}/{key}", content, mode=mode))
        except FileNotFoundError as error:
            raise failure(error) from None
        await self._settle(folder, key)

    async def _guard(self, folder: str, key: str) -> None:
        """Raises Unavailable where an object must not be touched."""

    async def _settle(self, folder: str, key: str) -> None:
        """What is left to do for an object that was written."""

    async def _call(self, operation: Awaitable[T], *, times: int = 1) -> T:
        """Raises FileNotFoundError, AlreadyExistsError and NotImplementedError as they are."""
        try:
            async with asyncio.timeout(self._patience * times):
                return await operation
        except (AlreadyExistsError, NotImplementedError):
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise failure(error) from None
            raise
        except (BaseError, OSError, ValueError) as error:
            raise failure(error) from None


def failure(error: Exception) -> SlotwireError:
    """What to tell a caller of an error of the store, which is logged: places and addresses are the operator's."""
    text = str(error)
    log.warning("snapshot store failed: %s", text.split("\n", 1)[0] or "it does not answer")
    found = _OS_ERROR.search(text)
    number = int(found[1]) if found else getattr(error, "errno", None)
    if number in _FULL:
        return Exhausted(f"the snapshot store is full: {os.strerror(number)}", reason="STORE_FULL")
    if number in _DENIED or isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return Unavailable("the snapshot store denies access", reason="STORE_DENIED")
    if "NoSuchBucket" in text:
        return Unavailable("the bucket of the snapshot store does not exist", reason="STORE_MISSING")
    problem = os.strerror(number) if number else "it does not answer"
    return Unavailable(
        f"the snapshot store cannot be used: {problem}", reason="STORE_UNAVAILABLE", retry_after=RETRY_AFTER
    )  # fmt: skip
