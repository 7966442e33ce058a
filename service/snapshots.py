"""Snapshots of a backend's slots in its store. The store is opened when it is first asked for something."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from service.slot_images import Destination, Restored, SavedImage, SlotImages
from service.state.integrity import chunk_of, digest_name
from service.state.location import StoreOptions
from service.state.room import StoreLimits
from service.state.sections import Bytes
from service.state.snapshot import Description, SnapshotInfo
from service.state.store import Page, SnapshotStore, open_store
from service.state.uploads import Uploads


@dataclass(frozen=True, slots=True)
class Read:
    """A snapshot that was restored, and the seconds that reading it took."""

    info: SnapshotInfo
    restored: Restored
    seconds: float


class Snapshots:
    """Saves slots by name and restores them. What is read counts as an upload, within the same limits."""

    def __init__(
        self, images: SlotImages, uploads: Uploads, url: str, options: StoreOptions, limits: StoreLimits
    ) -> None:
        self._images, self._uploads = images, uploads
        self._url, self._options, self._limits = url, options, limits
        self._store: SnapshotStore | None = None

    @property
    def store(self) -> SnapshotStore:
        """Raises ConfigError where there can be none."""
        if self._store is None:
            self._store = open_store(self._url, self._options, self._limits)
        return self._store

    async def save(
        self, name: str, slot_id: int, *, overwrite: bool, with_draft: bool, metadata: Mapping[str, str]
    ) -> tuple[SnapshotInfo, bool]:
        """Keep the state of a slot, busy or not. Returns also whether a generation can go on from there."""
        image = await self._images.save(slot_id, with_draft=with_draft)
        description = Description(image.tokens, image.model, image.fingerprint, metadata)
        info = await self.store.put(name, image.size, _pieces(image), description, overwrite=overwrite)
        return info, image.resumable

    async def restore(self, name: str, destination: Destination) -> Read:
        """Put a snapshot into a slot."""
        began = time.monotonic()
        info, data = await self.store.get(name)
        async with contextlib.aclosing(data):
            reader = self._images.reader(any_kind=destination.recompute)
            upload = self._uploads.begin(None, info.bytes, digest_name(info.digest), reader)
            try:
                with upload.attached():
                    async for piece in data:
                        await asyncio.to_thread(upload.take, chunk_of(piece, upload.committed))
                    completed = await asyncio.to_thread(upload.finish, info.digest)
                    seconds = time.monotonic() - began
                    return Read(info, await self._images.restore(completed, destination), seconds)
            finally:
                self._uploads.discard(upload)

    async def list(self, prefix: str, page_size: int, token: str) -> Page:
        return await self.store.list(prefix, page_size, token)

    async def info(self, name: str) -> SnapshotInfo:
        return await self.store.info(name)

    async def delete(self, name: str) -> None:
        await self.store.delete(name)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()


async def _pieces(image: SavedImage) -> AsyncIterator[Bytes]:
    for piece in image.pieces:
        yield piece
