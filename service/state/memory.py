"""The kinds of memory that llama.cpp has for a sequence, and what a payload tells about the one that wrote it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CacheKind(enum.Enum):
    ATTENTION = "attention"
    RECURRENT = "recurrent"


class MemoryKind(enum.Enum):
    """Which caches a memory has, in the order in which they are written."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"
    SLIDING_WINDOW = "sliding window"
    HYBRID_SLIDING_WINDOW = "hybrid sliding window"

    @property
    def caches(self) -> tuple[CacheKind, ...]:
        return _CACHES[self]

    @property
    def partial(self) -> tuple[CacheKind, ...]:
        """What is left with PARTIAL_ONLY: all but the cache that can be rolled back, if there are others."""
        return self.caches[1:] or self.caches


_CACHES = {
    MemoryKind.ATTENTION: (CacheKind.ATTENTION,),
    MemoryKind.RECURRENT: (CacheKind.RECURRENT,),
    MemoryKind.HYBRID: (CacheKind.ATTENTION, CacheKind.RECURRENT),
    MemoryKind.SLIDING_WINDOW: (CacheKind.ATTENTION, CacheKind.ATTENTION),
    MemoryKind.HYBRID_SLIDING_WINDOW: (CacheKind.ATTENTION, CacheKind.ATTENTION, CacheKind.RECURRENT),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """What one layer keeps for each cell. `part` is k, v, r or s; `row_bytes` is the size of a cell."""

    part: str
    type: str
    row_bytes: int


@dataclass(frozen=True, slots=True)
class CacheSummary:
    """One cache of a payload. `layers` is the count it states: its own layers, or the model's if it is recurrent.

    Positions are None where there are no cells. `consecutive`: there is a cell for each position between them.
    `extension` is in bytes a cell, `rotation` that of keys and values (None before version 4).
    """

    kind: CacheKind
    streams: int
    cells: int
    first_position: int | None
    last_position: int | None
    consecutive: bool
    extension: int
    layers: int
    transposed: bool
    rotation: tuple[int, int] | None
    tensors: tuple[Tensor, ...]
    bytes: int

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Tensor bytes of each layer that the cache has: keys and values, or r and s."""
        own = sum(tensor.part in "kr" for tensor in self.tensors)
        sizes = [0] * own
        for index, tensor in enumerate(self.tensors):
            sizes[index % own] += tensor.row_bytes * self.cells
        return tuple(sizes)

    @property
    def shape(self) -> tuple[object, ...]:
        """What must be equal for one context to take over what another wrote, whatever number of cells it has.

        Only of a cache with cells: an empty one does not tell all.
        """
        return (self.kind, self.streams, self.extension, self.layers, self.transposed, self.rotation, self.tensors)


@dataclass(frozen=True, slots=True)
class PayloadSummary:
    """`kind` is what parsed; with PARTIAL_ONLY, the first kind that leaves these caches."""

    kind: MemoryKind
    caches: tuple[CacheSummary, ...]
    bytes: int

    @property
    def shape(self) -> tuple[object, ...]:
        return tuple(cache.shape for cache in self.caches)
