"""Which cells of an attention cache the sequences hold: a copy of what llama.cpp keeps to itself.

Attention adds up over the cells in their order, in half precision. So the bits of a text depend on the order of its
cells, and that on its neighbours: whoever leaves makes holes, and new tokens go into the lowest hole. A text keeps its
bits if its cells stand in the order of its tokens. That is what this copy is for.

Source: `llama_kv_cache::find_slot` and `seq_rm` of llama-kv-cache.cpp. The search for free cells begins at the lowest
one that was freed and takes all that it meets, so that it always finds the lowest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.engine.batch import Segment

_MOST_PLUGS = 8  # rows; a state is moved rather than to compute more of them


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Segments in the order in which their cells come out right. `plugs[i]` are the holes that have to be filled before
    segment i.
    """

    segments: list[Segment]
    plugs: list[int]


class Cells:
    """The cells of a cache of unlimited size; its caller knows whether there is room."""

    def __init__(self) -> None:
        self._holes: list[int] = []
        """Free cells below `end`, in order."""
        self.end = 0
        """Behind the last cell in use."""
        self._held: dict[int, list[int]] = {}

    def of(self, sequence: int) -> Sequence[int]:
        """The cells of a sequence, in the order of its tokens."""
        return self._held.get(sequence, [])

    def place(self, sequence: int, count: int) -> None:
        """Tokens of a sequence were computed, or put back."""
        held = self._held.setdefault(sequence, [])
        taken = min(count, len(self._holes))
        held += self._holes[:taken]
        del self._holes[:taken]
        held += range(self.end, self.end + count - taken)
        self.end += count - taken

    def drop(self, sequence: int, length: int) -> None:
        """The tokens of a sequence from position `length` on were removed."""
        held = self._held.get(sequence, [])
        self._holes = sorted(self._holes + held[length:])
        del held[length:]
        while self._holes and self._holes[-1] == self.end - 1:
            self._holes.pop()
            self.end -= 1

    def arrange(self, segments: Iterable[Segment]) -> Arrangement:
        """The order of segments, and the plugs between them, with which each sequence gets cells behind its own."""
        ordered = sorted(segments, key=lambda segment: self._last(segment.slot))
        plugs, filled = [], 0
        for segment in ordered:
            below = max(bisect_left(self._holes, self._last(segment.slot)) - filled, 0)
            plugs.append(below)
            filled = min(filled + below + len(segment.tokens), len(self._holes))
        return Arrangement(ordered, plugs)

    def misplaced(self, segments: Iterable[Segment], room: int) -> list[int]:
        """Sequences before which so many holes would have to be filled that they had better be moved into them: more
        than a few, or together more than `room` rows.
        """
        arranged = self.arrange(segments)
        most = _MOST_PLUGS if sum(arranged.plugs) <= room else 0
        pairs = zip(arranged.segments, arranged.plugs, strict=True)
        return [segment.slot for segment, plugs in pairs if plugs > most]

    def below(self, segments: Iterable[Segment]) -> int:
        """Holes before the last cell of any of the segments' sequences."""
        return bisect_left(self._holes, max(self._last(segment.slot) for segment in segments))

    def _last(self, sequence: int) -> int:
        held = self._held.get(sequence)
        return held[-1] if held else -1
