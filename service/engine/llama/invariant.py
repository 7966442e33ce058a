"""Deterministic decodes: the logits of a row do not depend on the rows beside it, bit for bit.

ggml's kernels take another path for 64 rows and more, and some of them for a single row. So a micro-batch never has
more rows than `MICRO_BATCH`, and where a single row matters a row of the scratch sequence joins it. A recurrent memory
cuts a decode into micro-batches of equally many rows a sequence; it is given segments of one length at a time, so that
nothing is left over. And the cells of a sequence stay in the order of its tokens, see `cells`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np

from service.engine.batch import DecodeStatus, Logits, Segment
from service.engine.llama.cells import Cells
from service.engine.llama.memory import Memory

MICRO_BATCH = 32
"""The most rows of a micro-batch."""

SPLIT_ATTENTION = 256
"""Cells from which on the attention of a single row is split, if keys and values are both in f16 or both in f32."""


class Library(Protocol):
    """What computes, at most `max_rows` rows at once."""

    max_rows: int

    def decode_rows(self, segments: Sequence[Segment]) -> DecodeStatus:
        """One `llama_decode`, with the rows in the order of the segments."""

    def output_rows(self, count: int) -> Logits:
        """The logits of the first `count` output rows of the last decode; a view."""


@dataclass(frozen=True, slots=True)
class Part:
    """Segments to decode at once. `places[i]` is where the first output of segment i stands among all of the step."""

    segments: list[Segment]
    places: list[int]


class InvariantDecoder:
    """Decodes so that every row keeps its bits. `size` is that of the attention cache, 0 where there is none.

    After a decode `logits` has those of all output rows, shape [outputs, vocabulary].
    """

    def __init__(
        self, library: Library, memory: Memory, scratch: int, micro_batch: int, *, recurrent: bool, size: int
    ) -> None:
        self._library, self._memory, self._scratch, self._micro_batch = library, memory, scratch, micro_batch
        self._recurrent, self._size = recurrent, size
        self._cells = memory.cells = Cells() if size else None
        self.logits: Logits = np.empty((0, 0), np.float32)
        self.single_up_to: float = 0
        """Cells in use up to which a single row has the bits that it has in company."""

    def decode(self, segments: Sequence[Segment]) -> DecodeStatus:
        """NO_ROOM only where nothing was done."""
        todo = parts(segments, self._micro_batch, recurrent=self._recurrent)
        if len(todo) > 1 and self._size and not self._has_room(todo):
            return DecodeStatus.NO_ROOM
        gathered: Logits | None = None
        outputs = sum(segment.outputs for segment in segments)
        for part in todo:
            status = self._decode_part(part)
            if status is not DecodeStatus.OK:
                return status if part is todo[0] else DecodeStatus.FAILED
            fresh = self._library.output_rows(sum(segment.outputs for segment in part.segments))
            if len(todo) == 1 and part.segments == list(segments):
                gathered = fresh
                break
            if gathered is None:
                gathered = np.empty((outputs, fresh.shape[1]), np.float32)
            row = 0
            for segment, place in zip(part.segments, part.places, strict=True):
                gathered[place : place + segment.outputs] = fresh[row : row + segment.outputs]
                row += segment.outputs
        assert gathered is not None
        self.logits = gathered
        return DecodeStatus.OK

    def _decode_part(self, part: Part) -> DecodeStatus:
        """Sorts the segments of `part` into the order in which they were decoded."""
        plugs, filled = self._arrange(part), 0
        try:
            if self._recurrent and any(plugs):
                assert self._cells is not None
                plugs, filled = [0] * len(plugs), max(2, self._cells.below(part.segments))
                filled = min(filled, self._library.max_rows)
                status = self._decode_rows([Segment(self._scratch, [0] * filled, 0)])
                if status is not DecodeStatus.OK:
                    return status
            rows = self._padded(part.segments, plugs, filled)
            filled += len(rows) - len(part.segments)
            return self._decode_rows(rows)
        finally:
            if filled:
                self._memory.clear(self._scratch)

    def _arrange(self, part: Part) -> list[int]:
        """The rows to put before each segment; moves the sequences that would need too many."""
        if self._cells is None:
            return [0] * len(part.segments)
        room = self._library.max_rows - sum(len(segment.tokens) for segment in part.segments)
        for sequence in self._cells.misplaced(part.segments, room):
            self._memory.move(sequence)
        places = {segment.slot: place for segment, place in zip(part.segments, part.places, strict=True)}
        arranged = self._cells.arrange(part.segments)
        part.segments[:] = arranged.segments
        part.places[:] = [places[segment.slot] for segment in arranged.segments]
        return arranged.plugs

    def _padded(self, segments: Sequence[Segment], plugs: Sequence[int], scratch: int) -> list[Segment]:
        """The segments with rows of the scratch sequence, which has `scratch` tokens, between and behind them."""
        rows = []
        for segment, count in zip(segments, plugs, strict=True):
            if count:
                rows.append(Segment(self._scratch, [0] * count, scratch))
                scratch += count
            rows.append(segment)
        total = sum(len(segment.tokens) for segment in rows)
        single = len(segments) == 1 and total == 1 if self._recurrent else total % self._micro_batch == 1
        if single and (0 if self._cells is None else self._cells.end) + total > self.single_up_to:
            rows.append(Segment(self._scratch, [0], scratch))
        return rows

    def _decode_rows(self, segments: Sequence[Segment]) -> DecodeStatus:
        status = self._library.decode_rows(segments)
        if status is DecodeStatus.OK and self._cells is not None:
            for segment in segments:
                self._cells.place(segment.slot, len(segment.tokens))
        return status

    def _has_room(self, todo: Sequence[Part]) -> bool:
        """Whether all parts fit, so that none is left undone."""
        rows = sum(len(segment.tokens) for part in todo for segment in part.segments)
        spare = 2 * self._micro_batch  # for rows of the scratch sequence
        return rows + spare <= self._size - self._memory.total(self._scratch)


def parts(segments: Sequence[Segment], micro_batch: int, *, recurrent: bool) -> list[Part]:
    """What to decode one after the other, in place of `segments` at once."""
    places, place = [], 0
    for segment in segments:
        places.append(place)
        place += segment.outputs
    if not recurrent:
        return [Part(list(segments), places)]
    first: list[_Piece] = []
    later: list[_Piece] = []
    for segment, place in zip(segments, places, strict=True):
        head, tail = _cut(segment, micro_batch)
        first.append((head, place))
        later += [(tail, place)] if tail is not None else []
    return [*_alike(first, micro_batch), *_alike(later, micro_batch)]


_Piece = tuple[Segment, int]
"""A segment, and the place of its first output."""


def _alike(pieces: Sequence[_Piece], micro_batch: int) -> Iterator[Part]:
    """Pieces of one length at a time, so few that each has two rows or more in a micro-batch, or none but one."""
    width = micro_batch // 2
    for _, group in groupby(sorted(pieces, key=_length), key=_length):
        alike = list(group)
        for start in range(0, len(alike), width):
            chunk = alike[start : start + width]
            yield Part([segment for segment, _ in chunk], [place for _, place in chunk])


def _length(piece: _Piece) -> int:
    return len(piece[0].tokens)


def _cut(segment: Segment, micro_batch: int) -> tuple[Segment, Segment | None]:
    """The segment, in two if its last micro-batch would have one row."""
    length = len(segment.tokens)
    if length == 1 or length % micro_batch != 1:
        return segment, None
    cut = length - max(2, segment.outputs)
    return (
        Segment(segment.slot, segment.tokens[:cut], segment.start),
        Segment(segment.slot, segment.tokens[cut:], segment.start + cut, segment.outputs),
    )
