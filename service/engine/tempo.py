"""How many tokens to draft: an online model of what rows cost and what is accepted, and the choice that follows.

The expected tokens of a round are those of Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding" (2023): 1 + p + ... + p^n for n drafted tokens, each accepted with probability p if all before it were.
Nothing here has a clock or draws random numbers. Times are seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_ROW_SLOPE = 0.25  # of a further row, relative to the first, before anything was measured
_KNOWN = 8  # measurements after which a deviation is the machine's doing rather than an error of the curve
_MOST_KNOWN = 20  # measurements that count, so that the curve can still change
_DRIFT = 0.1  # weight of the newest measurement in the machine's speed
_OUTLIER = math.log(1.5)  # at most is believed of a deviation where the cost is known
_HICCUP = math.log(1.2)  # at most is believed of the first one upwards where it is not
_SURPRISE = math.log(2.0)  # at most of the second one in a row; downwards there are no hiccups
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

    def __init__(self, guess: float) -> None:
        """`guess` is the cost of one row before anything was measured."""
        self._guess = guess
        self._speed = 0.0
        """Logarithm of the factor for all points."""
        self._points: dict[int, list[float]] = {}
        """Rows to [logarithm of the relative cost, measurements that count, the last one's deviation]."""
        self._fitted: tuple[list[int], list[float]] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one decode. Hiccups are clipped; what a clock cannot tell (0 seconds) is ignored."""
        if rows <= 0 or seconds <= 0:
            return
        if not self._points:
            self._speed = math.log(seconds)
        place = _place(rows)
        here = math.log(self.at(place)) if self._points else self._speed
        within = math.log(self.at(rows)) - here if self._points else 0.0  # rows that share a point are not quite equal
        point = self._points.setdefault(place, [here - self._speed, 0.0, 0.0])
        error = math.log(seconds) - within - self._speed - point[0]
        if point[1] >= _KNOWN:
            believed = min(max(error, -_OUTLIER), _OUTLIER)
            if rows <= _SMALL:
                self._speed += _DRIFT * believed
        else:
            believed = min(error, max(point[2], _HICCUP), _SURPRISE)
        point[1] = min(point[1] + 1, _MOST_KNOWN)
        point[0] += believed / point[1]
        point[2] = error
        self._fitted = None

    def at(self, rows: int) -> float:
        """Expected seconds of a decode of `rows` rows; 0 for none. Never decreases with the rows."""
        if rows <= 0:
            return 0.0
        if not self._points:
            return self._guess * (1 + _ROW_SLOPE * (rows - 1))
        places, costs = self._fitted or self._fit()
        index = bisect_left(places, rows)
        if index == len(places):
            index -= 1
            slope = (costs[index] - costs[0]) / (places[index] - places[0]) if index else self._slope(places, costs)
        elif index == 0:
            slope = self._slope(places, costs)
        else:
            slope = (costs[index] - costs[index - 1]) / (places[index] - places[index - 1])
        return costs[index] + slope * (rows - places[index])

    @staticmethod
    def _slope(places: list[int], costs: list[float]) -> float:
        """Seconds a row around the first point, before anything else was measured."""
        return costs[0] * _ROW_SLOPE / (1 + _ROW_SLOPE * (places[0] - 1))

    def _fit(self) -> tuple[list[int], list[float]]:
        """Measured numbers of rows and their cost, non-decreasing."""
        places = sorted(self._points)
        pools: list[tuple[float, float, int]] = []  # cost, weight, points
        for place in places:
            logarithm, weight, _ = self._points[place]
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

    Each token up to the first rejected one is a trial; a draft accepted in full has seen no failure, only the end of
    the draft. Old trials are forgotten exponentially. `prior` is the record of similar drafts (of the source in all
    slots, say), which counts as long as there is little of its own; without one the start is optimistic, to be tried.
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

    A draft that does not pay is probed after 16 generated tokens, then 32, 64, ... up to 1024, and not before 1 % of the
    tokens generated since the last draft are worth what the probe is expected to cost. One that is accepted in full is
    followed by another, as long as that budget lasts; as soon as drafting pays, the pauses begin anew.
    """

    def __init__(self, prior: Acceptance | None = None) -> None:
        self.probing = False
        """Whether the last choice was a probe."""
        self._acceptance = Acceptance(prior)
        self._matches: dict[int, Acceptance] = {}
        self._pause = self._due_at = _FIRST_PAUSE
        self._waited = 0  # tokens generated since the last draft, apart from probes accepted in full
        self._spent = 0.0  # tokens that such probes have cost

    @property
    def due(self) -> bool:
        """Whether it is time for a probe."""
        return self._waited >= self._due_at

    def probe(self, cost: float, gain: float) -> bool:
        """Decide about a probe that is due, by what it costs and its expected gain, both in tokens."""
        self.probing = self._spent + cost - gain <= _PROBE_LOSS * self._waited
        if self.probing:
            self._spent += cost
        else:
            self._due_at = self._waited + _FIRST_PAUSE
        return self.probing

    def probability(self, match_length: int = 0) -> float:
        """Of acceptance; for n-grams given the length of the match, in classes 2-3, 4-7, 8-15, ... tokens."""
        return self._of(match_length).probability

    def record(self, generated: int, drafted: int, accepted: int, match_length: int = 0) -> None:
        """A round is over: the tokens that it added to the text, those drafted for it, and how many were accepted."""
        if drafted == 0:
            self._waited += generated
            return
        acceptance = self._of(match_length)
        if self.probing:
            acceptance.doubt()
        acceptance.observe(drafted, accepted)
        if self.probing and accepted == drafted:
            self._spent -= accepted
            return
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if self.probing else _FIRST_PAUSE
        self._waited, self._spent, self._due_at = 0, 0.0, self._pause

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
        self.target = RowCost(guess=1.0)
        self.draft = RowCost(guess=0.0)  # so that it is tried

    def choose(
        self, candidates: Sequence[Candidate], others: int = 0, prompt_rows: int = 0, room: int = 1 << 30
    ) -> list[int]:
        """How many tokens each candidate drafts; marks the tracks whose choice is a probe.

        `others` is the number of generating slots that are no candidates, `room` how many rows the decode has left. The
        rows of prompts are computed in any case: they only say where on the cost curve the drafts begin.
        """
        generating = len(candidates) + others
        chosen = self._climb(candidates, _Step(self, generating, prompt_rows), room)
        for index, candidate in enumerate(candidates):
            track = candidate.track
            track.probing = False
            if not chosen[index] and candidate.limit > 0 and track.due:
                n = min(_PROBE, candidate.limit, room - sum(chosen))
                if n > 0 and track.probe(
                    *_probe(_Step(self, generating, prompt_rows, 1), candidates, chosen, index, n)
                ):
                    chosen[index] = n
        return chosen

    def _climb(self, candidates: Sequence[Candidate], step: _Step, room: int) -> list[int]:
        """How many tokens each candidate drafts at the best speed that was found.

        The token that promises most for its cost is added next, even where it does not pay by itself, since costs have
        steps. It ends where all that is left to gain could not beat the best speed so far.
        """
        best, counts = [0] * len(candidates), [0] * len(candidates)
        left = sum(_expected(candidate.probability, candidate.limit) for candidate in candidates)
        rate = _MARGIN * step.expected / step.seconds()
        more = [index for index, candidate in enumerate(candidates) if candidate.limit > 0]
        while more and room > 0 and step.expected + left > rate * step.seconds(1):
            index = max(more, key=lambda index: step.worth(candidates[index], counts[index]))
            left -= step.add(candidates[index], counts[index])
            room -= 1
            counts[index] += 1
            if counts[index] == candidates[index].limit:
                more.remove(index)
            if step.expected > rate * step.seconds():
                best, rate = counts.copy(), step.expected / step.seconds()
        return best


class _Step:
    """What a step with drafts is expected to give and to cost. Catching up is written off over `rounds` rounds."""

    def __init__(self, tempo: Tempo, generating: int, prompt_rows: int, rounds: int = _ROUNDS) -> None:
        self.expected = float(generating)
        """Tokens."""
        self._target, self._draft = tempo.target, tempo.draft
        self._rows, self._rounds = generating + prompt_rows, rounds
        self._extra = self._target.at(generating) - self._target.at(self._rows) if prompt_rows else 0.0
        self._row = max(self.seconds(1) - self.seconds(), 1e-9)
        self._drafting: list[int] = []
        """How many slots take part in each step of the draft model."""

    def seconds(self, more: int = 0) -> float:
        """Of the step with `more` rows, without what the prompts cost in any case."""
        return self._target.at(self._rows + more) + self._extra

    def worth(self, candidate: Candidate, position: int) -> float:
        """Expected tokens a second of one more token for a slot that drafts `position` already."""
        return candidate.probability ** (position + 1) / (self._row + self._price(candidate, position))

    def add(self, candidate: Candidate, position: int) -> float:
        """Draft one more token for a slot that drafts `position` already; returns the tokens it is expected to give."""
        self._rows += 1
        self._extra += self._price(candidate, position)
        if candidate.model:
            if position == len(self._drafting):
                self._drafting.append(0)
            self._drafting[position] += 1
        gain: float = candidate.probability ** (position + 1)
        self.expected += gain
        return gain

    def _price(self, candidate: Candidate, position: int) -> float:
        """Seconds of that token apart from its row in the target."""
        price = 0.0
        if candidate.model:
            slots = self._drafting[position] if position < len(self._drafting) else 0
            price = self._draft.at(slots + 1) - self._draft.at(slots)
        if position == 0:
            price += candidate.overhead + self._draft.at(candidate.backlog) / self._rounds
        return price


def _probe(step: _Step, candidates: Sequence[Candidate], chosen: list[int], index: int, n: int) -> tuple[float, float]:
    """What a draft of `n` tokens beside the `chosen` ones costs the batch, and its expected gain, in tokens."""
    for candidate, count in zip(candidates, chosen, strict=True):
        for position in range(count):
            step.add(candidate, position)
    before, rate = step.seconds(), step.expected / step.seconds()
    gain = sum(step.add(candidates[index], position) for position in range(n))
    return (step.seconds() - before) * rate, gain


def _expected(probability: float, n: int) -> float:
    """Accepted tokens of `n` drafted ones: p + p^2 + ... + p^n."""
    return float(n) if probability >= 1 else probability * (1 - probability**n) / (1 - probability)
