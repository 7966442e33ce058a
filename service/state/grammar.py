"""The inner layout of what llama.cpp writes for one sequence, as a grammar that asks for bytes and does no I/O.

Nothing in these bytes says which kind of memory wrote them, how long they are, or whether cells carry an extension, so
a `Variant` names what to assume; `payload.py` finds the one that holds. Little-endian, no padding:

    attention cache   u32 streams; per stream u32 cells, and unless that is 0:
                      per cell i32 position, u32 1, extension, i32 sequence id
                      u32 transposed, u32 layers, from version 4 on u32 rotation of keys, u32 of values
                      per layer i32 type, u64 row bytes, rows of the cells (keys)
                      per layer the same (values), or transposed i32 type, u32 element bytes, u32 width, elements
    recurrent cache   u32 cells; per cell i32 position, u32 0; u32 0, u32 layers (of the model)
                      per layer that is recurrent i32 type, u64 row bytes, rows (r); then the same again (s)

A memory is one to three such caches in a row, and a partial state leaves the first out. Cells come in the order of the
cache, so their positions need not ascend. Sources: `state_write*` in `llama-kv-cache.cpp`,
`llama-kv-cache-iswa.cpp`, `llama-memory-recurrent.cpp`, `llama-memory-hybrid.cpp` and `llama-memory-hybrid-iswa.cpp` of
llama.cpp for version 3. Version 4: files that a server of that version wrote have two zeros there, which fits the
description of llama.cpp's pull request 28498 (rotation sizes are saved, and compared when restoring).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from service.state.errors import PayloadError
from service.state.layout import ROTATION_VERSION, TENSOR_TYPES, Limits, TensorType
from service.state.memory import CacheKind, CacheSummary, MemoryKind, PayloadSummary, Tensor
from service.state.positions import Positions

_MAX_ROTATION = 1 << 16
_CELLS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Variant:
    """Assumptions: the caches, the extension of their cells in bytes, and for each cache whether it has values."""

    kind: MemoryKind
    caches: tuple[CacheKind, ...]
    extension: int
    values: tuple[bool, ...]


class Ask(enum.Enum):
    TAKE = "take"
    """Send exactly so many bytes, a few KiB at most."""
    SKIP = "skip"
    """Drop so many bytes, however many; send nothing."""
    PEEK = "peek"
    """Send the next 4 bytes, fewer at the end, and send them again later."""


Request = tuple[Ask, int, str]
"""What to do, with how many bytes, and what these are."""


class Grammar:
    """One reading of a payload. `steps` yields requests, is sent bytes, and returns the summary.

    `layers` is the number of layers of the model, where known. Raises PayloadError.
    """

    def __init__(self, variant: Variant, version: int, layers: int | None, limits: Limits) -> None:
        self._variant = variant
        self._version = version
        self._layers = layers
        self._limits = limits
        self.offset = 0
        """Bytes understood so far."""
        self._field = 0  # where the last field begins

    def steps(self) -> Generator[Request, bytes, PayloadSummary]:
        caches = []
        for kind, values in zip(self._variant.caches, self._variant.values, strict=True):
            cache = self._attention(values) if kind is CacheKind.ATTENTION else self._recurrent()
            caches.append((yield from cache))
        return PayloadSummary(self._variant.kind, tuple(caches), self.offset)

    def _attention(self, values: bool) -> Generator[Request, bytes, CacheSummary]:
        start = self.offset
        streams = yield from self._count("streams", 1, self._limits.streams)
        found: CacheSummary | None = None
        for _ in range(streams):
            cells = yield from self._count("cells", 0, self._limits.tokens)
            if not cells:
                continue
            if found is not None:
                raise self._error("cells of one sequence in two streams")
            found = yield from self._stream(cells, values)
        return replace(found or _empty(), streams=streams, bytes=self.offset - start)

    def _stream(self, cells: int, values: bool) -> Generator[Request, bytes, CacheSummary]:
        """A stream that has cells."""
        positions = yield from self._cells(cells, CacheKind.ATTENTION)
        transposed = yield from self._count("transposition", 0, 1)
        layers = yield from self._count("layers", 1, self._layers or self._limits.layers)
        rotation = None
        if self._version >= ROTATION_VERSION:
            rotation = ((yield from self._rotation()), (yield from self._rotation()))
        tensors: list[Tensor] = []
        for part in ("k", "v") if values else ("k",):
            for _ in range(layers):
                columns = part == "v" and transposed
                tensor = yield from (self._columns(cells) if columns else self._rows(part, cells))
                tensors.append(tensor)
        return _cache(
            CacheKind.ATTENTION,
            positions,
            extension=self._variant.extension,
            layers=layers,
            transposed=bool(transposed),
            rotation=rotation,
            tensors=tuple(tensors),
        )

    def _recurrent(self) -> Generator[Request, bytes, CacheSummary]:
        start = self.offset
        # One cell is a sequence's whole state. llama.cpp aborts when it is given two.
        cells = yield from self._count("cells", 0, 1)
        positions = yield from self._cells(cells, CacheKind.RECURRENT)
        yield from self._count("transposition", 0, 0)
        layers = yield from self._count("layers", self._layers or 1, self._layers or self._limits.layers)
        tensors: list[Tensor] = []
        while (yield from self._row_follows()) and len(tensors) < 2 * layers:
            tensors.append((yield from self._rows("r", cells)))
        half, odd = divmod(len(tensors), 2)
        if not half or odd or len(set(tensors[:half])) > 1 or len(set(tensors[half:])) > 1:
            raise self._error(f"{len(tensors)} recurrent tensors that are not as many equal r as equal s")
        tensors[half:] = (replace(tensor, part="s") for tensor in tensors[half:])
        cache = _cache(CacheKind.RECURRENT, positions, layers=layers, tensors=tuple(tensors))
        return replace(cache, bytes=self.offset - start)

    def _row_follows(self) -> Generator[Request, bytes, bool]:
        """Whether the next 4 bytes are a tensor type, which no magic of a section is."""
        ahead = yield Ask.PEEK, 4, "tensor type"
        return len(ahead) == 4 and int.from_bytes(ahead, "little") in TENSOR_TYPES

    def _cells(self, cells: int, kind: CacheKind) -> Generator[Request, bytes, Positions]:
        attention = kind is CacheKind.ATTENTION
        extension = self._variant.extension if attention else 0
        words = (12 + extension if attention else 8) // 4
        # The tokens of a picture share a position, and an extension tells them apart.
        positions = Positions(max_runs=self._limits.position_runs, distinct=not extension)
        while cells:
            count = min(cells, _CELLS_AT_ONCE)
            block = yield from self._take(4 * words * count, "cells")
            table = np.frombuffer(block, "<i4").reshape(count, words)
            place, sequence = table[:, 0], table[:, -1]
            self._each_cell(table[:, 1] == attention, 4 * words, "a cell of another number of sequences")
            self._each_cell((place >= 0) & (place < self._limits.tokens), 4 * words, "a position that cannot be")
            if attention:
                valid = (sequence >= 0) & (sequence < self._limits.streams)
                self._each_cell(valid, 4 * words, "a sequence id that cannot be")
            self._checked(positions.add, place)
            cells -= count
        self._checked(positions.finish)
        return positions

    def _each_cell(self, valid: npt.NDArray[np.bool_], size: int, otherwise: str) -> None:
        if not valid.all():
            self._field += int(valid.argmin()) * size
            raise self._error(otherwise)

    def _rows(self, part: str, cells: int) -> Generator[Request, bytes, Tensor]:
        kind = yield from self._type()
        size = yield from self._number("<Q", "row size")
        # Some recurrent models have layers without s (or r), which still have their place.
        least = 0 if part in "rs" else 1
        if not least <= size <= self._limits.row_bytes or size % kind.bytes:
            raise self._error(f"rows of {size} bytes of {kind.name}")
        yield from self._skip(cells * size, f"{part} rows")
        return Tensor(part, kind.name, size)

    def _columns(self, cells: int) -> Generator[Request, bytes, Tensor]:
        """Transposed values: for each of `width` elements, that of each cell."""
        kind = yield from self._type()
        element = yield from self._number("<I", "element size")
        width = yield from self._number("<I", "width")
        if kind.block != 1 or element != kind.bytes or not 0 < width * element <= self._limits.row_bytes:
            raise self._error(f"{width} transposed elements of {element} bytes of {kind.name}")
        yield from self._skip(cells * width * element, "v elements")
        return Tensor("v", kind.name, width * element)

    def _rotation(self) -> Generator[Request, bytes, int]:
        """The size of a Hadamard matrix, or 0."""
        size = yield from self._count("rotation", 0, _MAX_ROTATION)
        if size & (size - 1):
            raise self._error(f"rotation {size} is no power of 2")
        return size

    def _type(self) -> Generator[Request, bytes, TensorType]:
        number = yield from self._number("<i", "tensor type")
        if number not in TENSOR_TYPES:
            raise self._error(f"unknown tensor type {number}")
        return TENSOR_TYPES[number]

    def _count(self, what: str, least: int, most: int) -> Generator[Request, bytes, int]:
        number = yield from self._number("<I", what)
        if not least <= number <= most:
            raise self._error(f"{what}: {number} is not {least}" + (f" to {most}" if most > least else ""))
        return number

    def _number(self, format: str, what: str) -> Generator[Request, bytes, int]:  # noqa: A002  # as struct calls it
        data = yield from self._take(struct.calcsize(format), what)
        number: int = struct.unpack(format, data)[0]
        return number

    def _take(self, size: int, what: str) -> Generator[Request, bytes, bytes]:
        data = yield Ask.TAKE, size, what
        self._field = self.offset
        self.offset += size
        return data

    def _skip(self, size: int, what: str) -> Generator[Request, bytes, None]:
        if self.offset + size > self._limits.state_bytes:
            raise self._error(f"{what} of {size} bytes")
        if size:
            yield Ask.SKIP, size, what
        self.offset += size

    def _checked(self, check: Callable[..., None], *arguments: object) -> None:
        try:
            check(*arguments)
        except ValueError as error:
            raise self._error(str(error)) from None

    def _error(self, message: str) -> PayloadError:
        return PayloadError(message, offset=self._field)


def _cache(
    kind: CacheKind,
    positions: Positions,
    *,
    layers: int,
    tensors: tuple[Tensor, ...],
    extension: int = 0,
    transposed: bool = False,
    rotation: tuple[int, int] | None = None,
) -> CacheSummary:
    """Without what only the caller knows."""
    return CacheSummary(
        kind=kind,
        streams=1,
        cells=positions.count,
        first_position=positions.first,
        last_position=positions.last,
        consecutive=positions.consecutive,
        extension=extension,
        layers=layers,
        transposed=transposed,
        rotation=rotation,
        tensors=tensors,
        bytes=0,
    )


def _empty() -> CacheSummary:
    """Of an attention cache without cells, about which a payload tells nothing."""
    return _cache(CacheKind.ATTENTION, Positions(max_runs=1, distinct=True), layers=0, tensors=())
