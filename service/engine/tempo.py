"""How many tokens to draft: an online model of what rows cost and what is accepted, and the choice that follows.

The expected tokens of a round are those of Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding" (2023): 1 + p + ... + p^n for n drafted tokens, each accepted with probability p if all before it were. Nothing
here has a clock or draws random numbers. Times are seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

_ROW_SLOPE = 0.25  # of a further row, relative to the first, before anything was measured
_KNOWN = 8  # measurements after which a deviation is the machine's doing rather than an error of the curve
_MOST_KNOWN = 20  # measurements that count, so that the curve can still change
_DRIFT = 0.1  # weight of the newest measurement in the machine's speed
_OUTLIER = math.log(1.5)  # at most is believed of a single measurement where the cost is known
_SURPRISE = math.log(2.0)  # and where it is not
_SMALL = 64  # rows; larger decodes are prompts and say little about the speed of small ones

_OPTIMISM = 0.75  # the acceptance that is assumed before anything was seen
_PRIOR_TRIALS = 3.0  # what that, or the record of similar drafts, counts
_MEMORY = 32.0  # trials, after which an observation has lost 63 % of its weight
_DOUBTED = 8.0  # trials that are left when drafting is tried again after a pause

_PROBE = 2  # tokens of a probe
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024  # generated tokens
_PROBE_LOSS = 0.01  # of the tokens generated in the pause is what a probe may cost
_MARGIN = 1.02  # times the speed without drafts has to be expected, or the difference may be noise
_ROUNDS = 16  # over which catching up with a slot's text is written off


class RowCost:
    """Seconds of a decode by its number of rows, learned while running.

    The cost is a curve times the speed of the machine. The curve has a point for each number of rows up to 15 and eight
    for each doubling beyond; it is made non-decreasing by pooling adjacent violators (isotonic regression). The speed
    moves all points at once, so that a change of load, seen at one number of rows, does not make another look cheap.
    """

    def __init__(self, slope: float = _ROW_SLOPE) -> None:
        self._slope = slope
        self._speed = 0.0
        """Logarithm of the factor for all points."""
        self._points: dict[int, list[float]] = {}
        """Rows to [logarithm of the relative cost, measurements that count]."""
        self._fitted: tuple[list[int], list[float]] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one decode. Hiccups are clipped; what a clock cannot tell (0 seconds) is ignored."""
        if rows <= 0 or seconds <= 0:
            return
        if not self._points:
            self._speed = math.log(seconds / (1 + self._slope * (rows - 1)))
        place = _place(rows)
        predicted = math.log(self.at(rows))
        offset = predicted - math.log(self.at(place))
        point = self._points.setdefault(place, [predicted - offset - self._speed, 0.0])
        error = math.log(seconds) - self._speed - point[0] - offset
        if point[1] < _KNOWN:
            error = min(error, _SURPRISE)
        else:
            error = min(max(error, -_OUTLIER), _OUTLIER)
            if rows <= _SMALL:
                self._speed += _DRIFT * error
        point[0] += error / (point[1] + 2)
        point[1] = min(point[1] + 1, _MOST_KNOWN)
        self._fitted = None

    def at(self, rows: int) -> float:
        """Expected seconds of a decode of `rows` rows; 0 for none. Never decreases with the rows."""
        if rows <= 0:
            return 0.0
        places, costs = self._fitted or self._fit()
        index = bisect_left(places, rows)
        if index == len(places):
            first = places[0]
            slope = (
                (costs[-1] - costs[0]) / (places[-1] - first) if len(places) > 1 else self._prior_slope(places, costs)
            )
            return costs[-1] + slope * (rows - places[-1])
        if places[index] == rows:
            return costs[index]
        if index == 0:
            return costs[0] - self._prior_slope(places, costs) * (places[0] - rows)
        low, high = places[index - 1], places[index]
        return costs[index - 1] + (costs[index] - costs[index - 1]) * (rows - low) / (high - low)

    def _prior_slope(self, places: list[int], costs: list[float]) -> float:
        """Seconds a row around the first measured point, if the guess is right."""
        return costs[0] * self._slope / (1 + self._slope * (places[0] - 1))

    def _fit(self) -> tuple[list[int], list[float]]:
        """Measured numbers of rows and their cost, non-decreasing."""
        if not self._points:
            return [1], [math.exp(self._speed)]
        places = sorted(self._points)
        pools: list[tuple[float, float, int]] = []  # cost, weight, points
        for place in places:
            logarithm, weight = self._points[place]
            cost, count = math.exp(self._speed + logarithm), 1
            while pools and pools[-1][0] > cost:
                other, other_weight, others = pools.pop()
                cost = (cost * weight + other * other_weight) / (weight + other_weight)
                weight, count = weight + other_weight, count + others
            pools.append((cost, weight, count))
        self._fitted = places, [cost for cost, _, count in pools for _ in range(count)]
        return self._fitted


def _place(rows: int) -> int:
    """The point of the curve that a number of rows belongs to."""
    step = 1 << max(0, rows.bit_length() - 4)
    return (rows + step // 2) // step * step


class Acceptance:
    """The probability that a drafted token is accepted if all before it were.

    Each token up to the first rejected one is a trial; a draft accepted in full has seen no failure, only the end of the
    draft. Old trials are forgotten exponentially. `prior` is the record of similar drafts (of the source in all slots,
    say), which counts as long as there is little of its own; without one the start is optimistic, to be tried at all.
    """

    def __init__(self, prior: Acceptance | None = None, memory: float = _MEMORY) -> None:
        self._prior, self._memory = prior, memory
        self._accepted = self._rejected = 0.0

    @property
    def probability(self) -> float:
        expected = self._prior.probability if self._prior else _OPTIMISM
        trials = self._accepted + self._rejected + _PRIOR_TRIALS
        return (self._accepted + _PRIOR_TRIALS * expected) / trials

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from one verified draft, here and in the priors."""
        rejected = accepted < drafted
        kept = math.exp(-(accepted + rejected) / self._memory)
        self._accepted = self._accepted * kept + accepted
        self._rejected = self._rejected * kept + rejected
        if self._prior:
            self._prior.observe(drafted, accepted)

    def doubt(self) -> None:
        """Let little remain of what is known, since it is old."""
        trials = self._accepted + self._rejected
        if trials > _DOUBTED:
            self._accepted *= _DOUBTED / trials
            self._rejected *= _DOUBTED / trials


class Track:
    """The record of one source of drafts in one slot: what was accepted, and when it is tried again.

    A draft that does not pay is probed after 16 generated tokens, then 32, 64, ... up to 1024. A probe that is accepted
    in full is followed by another one; as soon as drafting pays, the pauses begin anew. With `probes` False (n-grams,
    which can be watched for nothing) it never probes.
    """

    def __init__(self, prior: Acceptance | None = None, probes: bool = True) -> None:
        self.waited = 0
        """Tokens generated since the last draft."""
        self.probing = False
        """Set by `Tempo.choose`: the choice is a probe."""
        self._acceptance = Acceptance(prior)
        self._matches: dict[int, Acceptance] = {}
        self._probes, self._pause = probes, _FIRST_PAUSE

    @property
    def due(self) -> bool:
        return self._probes and self.waited >= self._pause

    def probability(self, match_length: int = 0) -> float:
        """Of acceptance; for n-grams given the length of the match, in classes 2-3, 4-7, 8-15, ... tokens."""
        return self._of(match_length).probability

    def record(self, generated: int, drafted: int, accepted: int, match_length: int = 0) -> None:
        """A round is over: the tokens that it added to the text, those drafted for it, and how many were accepted."""
        if drafted == 0:
            self.waited += generated
            return
        acceptance = self._of(match_length)
        if not self.probing:
            self.waited, self._pause = 0, _FIRST_PAUSE
        else:
            acceptance.doubt()
            if accepted < drafted:
                self.waited, self._pause = 0, min(2 * self._pause, _LONGEST_PAUSE)
        acceptance.observe(drafted, accepted)

    def watched(self, drafted: int, accepted: int, match_length: int = 0) -> None:
        """Learn from a draft that was compared with the text without being computed."""
        self._of(match_length).observe(drafted, accepted)

    def _of(self, match_length: int) -> Acceptance:
        if match_length == 0:
            return self._acceptance
        return self._matches.setdefault(match_length.bit_length(), Acceptance(self._acceptance))


@dataclass(slots=True)
class Candidate:
    """A generating slot that may draft up to `limit` tokens, each accepted with `probability`.

    `model` tells that a draft model makes them, in steps shared with the other slots, and `backlog` how many tokens it
    has to be fed first in a decode of its own; else they are free. `overhead` is what drafting at all costs the slot in
    each round, in seconds (a checkpoint and its way back).
    """

    track: Track
    limit: int
    probability: float
    model: bool = False
    backlog: int = 0
    overhead: float = 0.0


class Tempo:
    """Chooses the drafts of a step so that the whole batch is expected to generate the most tokens a second.

    `target` learns from each decode of the target, `draft` from each step of the draft model by the number of slots in
    it (and from its other decodes by their rows).
    """

    def __init__(self) -> None:
        self.target = RowCost()
        self.draft = RowCost()

    def choose(
        self, candidates: Sequence[Candidate], others: int = 0, prompt_rows: int = 0, room: int = 1 << 30
    ) -> list[int]:
        """How many tokens each candidate drafts; marks the tracks whose choice is a probe.

        `others` is the number of generating slots that are no candidates, `room` how many rows the decode has left. The
        rows of prompts are computed in any case: they count only as the place on the cost curve where drafts begin.
        """
