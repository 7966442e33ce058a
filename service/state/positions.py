"""The positions of a cache's cells, checked while they come and without keeping each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]


class Positions:
    """Takes positions in the order of the cells. Raises ValueError with what is wrong.

    Where they are `distinct`, each must occur once. Cells that were used again make the order fall apart into runs of
    consecutive positions, of which there may be `max_runs`.
    """

    def __init__(self, *, max_runs: int, distinct: bool) -> None:
        self._max_runs = max_runs
        self._distinct = distinct
        self._starts: list[Words] = []
        self._ends: list[Words] = []  # inclusive
        self._runs = 0
        self.count = 0
        self.first: int | None = None
        self.last: int | None = None

    def add(self, positions: Words) -> None:
        if not len(positions):
            return
        low, high = int(positions.min()), int(positions.max())
        self.count += len(positions)
        self.first = low if self.first is None else min(self.first, low)
        self.last = high if self.last is None else max(self.last, high)
        if self._distinct:
            self._split(positions)

    def finish(self) -> None:
        """After the last cell."""
        if self._runs < 2:
            return
        starts, ends = np.concatenate(self._starts), np.concatenate(self._ends)
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        twice = np.flatnonzero(starts[1:] <= ends[:-1])
        if len(twice):
            raise ValueError(f"two cells for position {starts[1:][twice[0]]}")

    @property
    def consecutive(self) -> bool:
        """Whether there is one cell for each position between the first and the last."""
        if self.first is None or self.last is None:
            return True
        return self.last - self.first + 1 == self.count

    def _split(self, positions: Words) -> None:
        cuts = np.flatnonzero(np.diff(positions) != 1)
        starts = positions[np.concatenate(([0], cuts + 1))]
        ends = positions[np.concatenate((cuts, [len(positions) - 1]))]
        if self._ends and self._ends[-1][-1] + 1 == starts[0]:
            # goes on where the block before ended
            self._ends[-1] = np.append(self._ends[-1][:-1], ends[0])
            starts, ends = starts[1:], ends[1:]
        if not len(starts):
            return
        self._runs += len(starts)
        if self._runs > self._max_runs:
            raise ValueError(f"positions are in more than {self._max_runs} runs")
        self._starts.append(starts)
        self._ends.append(ends)
