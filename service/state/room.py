"""How much a store may hold. What is on its way counts with the bytes that it announced, so that one that was let in
has room to its end, and two at once do not exceed a limit that each of them alone would keep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass

from service.errors import Exhausted


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """`snapshot_bytes` is for each snapshot, `total_bytes` and `snapshots` for all together. 0 is no limit.

    All data in the store counts, also what a sweep would remove. While a snapshot is replaced, both are there; the
    larger one counts.
    """

    snapshot_bytes: int = 0
    total_bytes: int = 0
    snapshots: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """What is in a store: the names of its snapshots, and the sizes of all data in bytes, by key."""

    names: Set[str]
    sizes: Mapping[str, int]


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for data of `size` bytes that is being written. `replaces` is the key of what it takes the place of."""

    name: str
    data: str
    size: int
    replaces: str | None = None


class Room:
    """`survey` tells what is in the store now; it is asked only where there is a limit that needs it."""

    def __init__(self, limits: StoreLimits, survey: Callable[[], Awaitable[Stored]]) -> None:
        self.limits = limits
        self._survey = survey
        self._held: set[Reservation] = set()
        self._lock = asyncio.Lock()

    async def reserve(self, reservation: Reservation) -> None:
        """Raises Exhausted where there is no room for it."""
        async with self._lock:
            await self._admit(reservation, reservation.size)
            self._held.add(reservation)

    async def grow(self, reservation: Reservation, size: int, step: int) -> None:
        """Room for `size` bytes or, where there is some, for `step` more. Raises Exhausted; the room it had stays."""
        async with self._lock:
            try:
                await self._admit(reservation, size + step)
                reservation.size = size + step
            except Exhausted:
                await self._admit(reservation, size)
                reservation.size = size

    def release(self, reservation: Reservation) -> None:
        """What was written is in the store now, or never will be. Once is enough."""
        self._held.discard(reservation)

    def on_their_way(self) -> set[str]:
        """The keys of data that is being written."""
        return {held.data for held in self._held}

    async def _admit(self, wanted: Reservation, size: int) -> None:
        limits = self.limits
        if limits.snapshot_bytes and size > limits.snapshot_bytes:
            message = f"snapshot {wanted.name} has {size} bytes; the limit for one is {limits.snapshot_bytes}"
            raise Exhausted(message, reason="SNAPSHOT_TOO_LARGE", limit=limits.snapshot_bytes, actual=size)
        if not limits.total_bytes and not limits.snapshots:
            return
        # Those that are done before the survey is must not be missed: they count as on their way.
        others = [held for held in self._held if held is not wanted]
        stored = await self._survey()
        count = len(stored.names | {held.name for held in others} - {wanted.name})
        if limits.snapshots and wanted.name not in stored.names and count >= limits.snapshots:
            message = f"the store has {count} snapshots; the limit is {limits.snapshots}"
            raise Exhausted(message, reason="SNAPSHOTS_FULL", limit=limits.snapshots, actual=count)
        on_their_way = {held.data for held in (*others, wanted)}
        total = sum(size_ for key, size_ in stored.sizes.items() if key not in on_their_way)
        total += sum(_charge(held, held.size, stored) for held in others)
        charge = _charge(wanted, size, stored)
        if limits.total_bytes and total + charge > limits.total_bytes:
            message = f"the store has {total} bytes; with {charge} more they exceed the limit of {limits.total_bytes}"
            raise Exhausted(message, reason="STORE_FULL", limit=limits.total_bytes, actual=total + charge)


def _charge(reservation: Reservation, size: int, stored: Stored) -> int:
    """Bytes that it may add to what is stored."""
    replaced = stored.sizes.get(reservation.replaces, 0) if reservation.replaces else 0
    return max(size - replaced, 0)
