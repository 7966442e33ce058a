"""How many rows of prompts go into a step, so that the slots that are generating keep their pace."""

from __future__ import annotations

_WEIGHT = 0.5  # of the newest measurement of the pace
_OUTLIER = 1.5  # times what was expected, at most, is believed of a single measurement
_FIRST_CHUNK = 8  # rows, before anything was measured
_GROWTH = 1.5  # at most, from step to step: larger batches may take a slower path than the one measured
_SHRINKAGE = 0.5  # at most, from step to step: it may have been a hiccup of the machine
_GRANT = 1.3  # times the present pace that a step may always last, so that a prompt goes on whatever the load
_REFRESH = 16  # steps with prompts, after which one without them measures the present pace


class Pacer:
    """Steers the size of prompt chunks by the time that steps take, in seconds.

    A step that only generates sets the pace. Beside a prompt, a step may last `factor` times as long as it did when
    the prompt came. The pace itself gets slower as contexts grow, so it is measured again from time to time, and a
    prompt is granted a part of the present pace in any case. A chunk is scaled by how far the last one was from that
    target: an error shrinks from step to step, and no single measurement upsets it. Without anyone generating, a chunk
    is as large as a decode can be.
    """

    def __init__(self, factor: float, max_rows: int) -> None:
        self._factor, self._max_rows = factor, max_rows
        self._pace: dict[int, float] = {}
        self._chunk = float(_FIRST_CHUNK)
        self._before: float | None = None
        """The pace when the present prompts came; None without prompts."""
        self._mixed = 0
        """Steps with prompts since the pace was measured."""

    def prompt_rows(self, generating: int, prompts: bool) -> int:
        """The most rows of prompts that the next step may take; 0 where it is to measure the pace.

        `generating` is the number of slots that generate, `prompts` says whether any prompt is being processed.
        """
        if not prompts:
            self._before = None
        if generating == 0:
            return self._max_rows
        if prompts and self._before is None:
            self._before = self._pace_of(generating)
        if self._mixed >= _REFRESH:
            return 0
        return max(1, min(int(self._chunk), self._max_rows - generating))

    def observe(self, generating: int, prompt_rows: int, seconds: float) -> None:
        """Learn from a step that was done."""
        if generating == 0 or seconds <= 0:  # nobody to keep the pace for, or a clock too coarse to tell
            return
        if prompt_rows == 0:
            known = self._pace.get(generating, seconds)
            self._pace[generating] = known + _WEIGHT * (min(seconds, _OUTLIER * known) - known)
            self._mixed = 0
            return
        self._mixed += 1
        pace = self._pace_of(generating)
        if pace is None:
            return
        target = max(_GRANT * pace, self._factor * min(pace, self._before or pace))
        if prompt_rows >= int(self._chunk) or seconds > target:
            scale = min(max(target / seconds, _SHRINKAGE), _GROWTH)
            self._chunk = min(max(scale * min(self._chunk, prompt_rows + 1), 1.0), float(self._max_rows))

    def _pace_of(self, generating: int) -> float | None:
        """Of the measured number of generating slots that is nearest."""
        if not self._pace:
            return None
        return self._pace[min(self._pace, key=lambda n: abs(n - generating))]
