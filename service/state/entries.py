"""The entries of a store: which snapshots there are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from weakref import WeakValueDictionary

from service.errors import Conflict, DataLoss, NotFound
from service.state.names import check_name, key_of, name_of
from service.state.objects import ENTRIES, Objects
from service.state.snapshot import MAX_ENTRY, Entry, damaged, decode

log = logging.getLogger("slotwire.state")

_READS_AT_ONCE = 16


class Entries:
    """Everything here raises InvalidRequest for a name that can be none, Unavailable where the store does not work."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def lock(self, name: str) -> asyncio.Lock:
        """For those who change an entry by what it was."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def names(self) -> list[str]:
        """In no order."""
        return [name for found in await self._objects.found(ENTRIES) if (name := name_of(found.key)) is not None]

    async def get(self, name: str) -> Entry:
        """Raises NotFound, and as `find` does."""
        entry = await self.find(name)
        if entry is None:
            raise not_found(name)
        return entry

    async def find(self, name: str) -> Entry | None:
        """Raises DataLoss for a damaged entry, Conflict where the file system takes the name for another."""
        check_name(name)
        content = await self._objects.read(ENTRIES, key_of(name), MAX_ENTRY)
        if content is None:
            return None
        entry = decode(content, name)
        found = entry.info.name
        if found != name and found.lower() == name.lower():
            raise already_there(found)
        if found != name:
            raise damaged(name, f"its entry is that of {found}")
        return entry

    async def current(self, name: str) -> tuple[bool, str | None]:
        """Whether there is an entry, damaged or not, and the key of its data where that is known."""
        try:
            entry = await self.find(name)
        except DataLoss:
            return True, None
        return entry is not None, entry.data if entry else None

    async def all(self, names: Sequence[str], *, strict: bool = False) -> list[Entry]:
        """Those that are still there, in the order of their names. A damaged one is left out, unless `strict`: then it
        raises DataLoss.
        """
        at_once = asyncio.Semaphore(_READS_AT_ONCE)

        async def one(name: str) -> Entry | None:
            async with at_once:
                try:
                    return await self.find(name)
                except DataLoss as error:
                    if strict:
                        raise
                    log.warning("snapshot left out of a list: %s", error.message)
                    return None

        return [entry for entry in await asyncio.gather(*map(one, names)) if entry is not None]

    async def write(self, entry: Entry, *, overwrite: bool) -> bool:
        """False where there is one already, unless `overwrite`."""
        key, content = key_of(entry.info.name), entry.encode()
        if not overwrite:
            return await self._objects.create(ENTRIES, key, content)
        await self._objects.replace(ENTRIES, key, content)
        return True

    async def remove(self, name: str) -> None:
        await self._objects.delete(ENTRIES, key_of(name))


def not_found(name: str) -> NotFound:
    return NotFound(f"there is no snapshot {name}", reason="SNAPSHOT_NOT_FOUND", name=name)


def already_there(name: str) -> Conflict:
    return Conflict(f"there is a snapshot {name} already", reason="SNAPSHOT_EXISTS", name=name)
