"""Deterministic decodes: the logits of a row do not depend on the rows beside it, bit for bit.

ggml's kernels take another path for a single row, and another one for 64 rows and more. So a micro-batch never has one
row, and never more than `MICRO_BATCH`: where one row would be left over, a row of the scratch sequence joins it. A
recurrent memory cuts a decode into micro-batches of equally many rows a sequence; it is given segments of one length at
a time, so that nothing is left over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from service.engine.batch import Segment

MICRO_BATCH = 32
"""The most rows of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Part:
    """Segments to decode at once. `outputs[i]` is where the first output of segment i stands among all of the step."""

    segments: list[Segment]
    outputs: list[int]


def parts(segments: Sequence[Segment], micro_batch: int, scratch: int, *, recurrent: bool) -> list[Part]:
    """What to decode one after the other, in place of `segments` at once."""
    places = _places(segments)
    if not recurrent:
        rows = sum(len(segment.tokens) for segment in segments)
        pad = [_pad(scratch)] if rows % micro_batch == 1 else []
        return [Part([*segments, *pad], [*places, *[0] * len(pad)])]
    first: list[_Piece] = []
    later: list[_Piece] = []
    for segment, place in zip(segments, places, strict=True):
        head, tail = _cut(segment, micro_batch)
        first.append((head, place))
        later += [(tail, place)] if tail is not None else []
    return [*_alike(first, micro_batch, scratch), *_alike(later, micro_batch, scratch)]


_Piece = tuple[Segment, int]
"""A segment, and the place of its first output."""


def _alike(pieces: list[_Piece], micro_batch: int, scratch: int) -> Iterator[Part]:
    """Pieces of one length at a time, so few that each has two rows or more in a micro-batch, or none but one."""
    width = micro_batch // 2
    for length, group in groupby(sorted(pieces, key=_length), key=_length):
        alike = list(group)
        for start in range(0, len(alike), width):
            chunk = alike[start : start + width]
            if len(chunk) == 1 and length == 1:
                chunk.append((_pad(scratch), 0))
            yield Part([segment for segment, _ in chunk], [place for _, place in chunk])


def _length(piece: _Piece) -> int:
    return len(piece[0].tokens)


def _places(segments: Sequence[Segment]) -> list[int]:
    places, place = [], 0
    for segment in segments:
        places.append(place)
        place += segment.outputs
    return places


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


def _pad(scratch: int) -> Segment:
    return Segment(scratch, (0,), 0)
