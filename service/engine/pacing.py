"""How many rows of prompts go into a step, so that the slots that are generating keep their pace."""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest measurement
_OUTLIER = 1.5  # times what was expected, at most, is believed of a single measurement
_FIRST_CHUNK = 8  # rows, before anything was measured
_GROWTH = 1.5  # at most, from step to step: larger batches may take a slower path than the one measured
_SHRINKAGE = 0.5  # at most, from step to step: it may have been a hiccup of the machine


class Pacer:
    """Steers the size of prompt chunks by the time that steps take, in seconds.

    A step that only generates sets the pace. A step that also takes prompt rows may last `factor` times as long: its
    chunk is scaled by how far the last one was from that, so that an error shrinks from step to step and a wrong pace
    cannot make a step much longer than that pace allows. Without anyone generating, a chunk is as large as a decode can
    be.
    """

    def __init__(self, factor: float, max_rows: int) -> None:
        self._factor, self._max_rows = factor, max_rows
        self._pace: dict[int, float] = {}
        self._chunk = float(_FIRST_CHUNK)

    def prompt_rows(self, generating: int) -> int:
        """The most rows of prompts that the next step may take, at least one."""
        if generating == 0:
            return self._max_rows
        return max(1, min(int(self._chunk), self._max_rows - generating))

    def observe(self, generating: int, prompt_rows: int, seconds: float) -> None:
        """Learn from a step that was done."""
        if generating == 0 or seconds <= 0:  # nobody to keep the pace for, or a clock too coarse to tell
            return
        pace = self._pace_of(generating)
        if prompt_rows == 0:
            known = self._pace.get(generating, seconds)
            self._pace[generating] = known + _WEIGHT * (min(seconds, _OUTLIER * known) - known)
        elif pace is not None and (prompt_rows >= int(self._chunk) or seconds > self._factor * pace):
            scale = min(max(self._factor * pace / seconds, _SHRINKAGE), _GROWTH)
            self._chunk = min(max(scale * min(self._chunk, prompt_rows + 1), 1.0), float(self._max_rows))

    def _pace_of(self, generating: int) -> float | None:
        """Of the measured number of generating slots that is nearest."""
        if not self._pace:
            return None
        return self._pace[min(self._pace, key=lambda n: abs(n - generating))]
