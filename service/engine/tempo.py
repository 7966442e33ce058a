"""How many tokens to draft for each slot in a step, from what rows cost and what is accepted.

The expected tokens of a round are those of Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding" (2023): 1 + p + ... + p^n for n drafted tokens, each accepted with probability p if all before it were.
Nothing here has a clock or draws random numbers. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.engine.acceptance import Track
from service.engine.rowcost import RowCost

_PROBE = 2  # tokens of a probe
_MARGIN = 1.03  # times the speed without drafts has to be expected, or the difference may be noise
_UNSURE = 1.15  # the same where the speed without drafts was hardly measured, which it will be then
_ROOM = 0.02  # of a step is the least that a row is taken to cost when tokens compete for it
_ROUNDS = 16  # over which catching up with a slot's text is written off
_USUAL_BACKLOG = 8  # comes with every round: the target's own token, and what the draft's memory could not keep


@dataclass(slots=True)
class Candidate:
    """A generating slot that may draft up to `limit` tokens, each accepted with `probability`.

    `model` tells that a draft model makes them, in steps shared with the other slots; else they are free. `backlog` is
    the number of tokens of the text that it has not seen, the newest one included: it reads them in its first step.
    `overhead` is what drafting at all costs the slot in each round, in seconds (a checkpoint and its way back).
    """

    track: Track
    limit: int
    probability: float
    model: bool = False
    backlog: int = 1
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
        if not candidates:
            return []
        chosen = self._climb(_Step(self, candidates, others, prompt_rows), len(candidates) + others, room)
        for index, candidate in enumerate(candidates):
            candidate.track.probing = False
            n = min(_PROBE, candidate.limit, room - sum(chosen))
            if n <= 0 or chosen[index] or not candidate.track.due:
                continue
            step = _Step(self, candidates, others, prompt_rows, rounds=1)
            if candidate.track.probe(*step.probe(chosen, index, n)):
                chosen[index] = n
        return chosen

    def _climb(self, step: _Step, generating: int, room: int) -> list[int]:
        """How many tokens each candidate drafts at the best speed that was found.

        The token that promises most for its cost is added next, even where it does not pay by itself, since costs have
        steps, until nothing that is left could beat the best speed so far.
        """
        rate = (_MARGIN if self.target.known(generating) else _UNSURE) * step.expected / step.seconds
        best = step.counts.copy()
        while room > 0 and (index := step.most_promising(rate)) is not None:
            step.add(index)
            room -= 1
            if step.expected > rate * step.seconds:
                best, rate = step.counts.copy(), step.expected / step.seconds
        return best


class _Step:
    """What a step with drafts is expected to give and to cost, while they are being chosen.

    What the prompts cost in any case is left out. A backlog is written off over `rounds` rounds.
    """

    def __init__(
        self, tempo: Tempo, candidates: Sequence[Candidate], others: int, prompt_rows: int, rounds: int = _ROUNDS
    ) -> None:
        self._target, self._draft, self._candidates, self._rounds = tempo.target, tempo.draft, candidates, rounds
        generating = len(candidates) + others
        self._rows = generating + prompt_rows
        self.counts = [0] * len(candidates)
        """Tokens drafted for each candidate."""
        self.expected = float(generating)
        """Tokens of the step."""
        self.seconds = self._target.at(generating)
        self._extra = self.seconds - self._target.at(self._rows)  # what the rows of the target do not account for
        self._further = self._target.at(self._rows + 1) + self._extra  # seconds with one row more
        self._left = sum(_expected(candidate.probability, candidate.limit) for candidate in candidates)
        self._drafting: list[int] = []  # rows of each step of the draft model
        self._row = max(self._target.least_slope(self._rows), 1e-9)  # seconds that each further row costs at least
        self._next_row = max(self._further - self.seconds, _ROOM * self.seconds)
        slots = sum(candidate.model for candidate in candidates)
        self._share = self._draft.at(slots) / max(slots, 1)  # seconds of a step of the draft model, if all take part
        self._worths = {index: self._worth(index) for index, candidate in enumerate(candidates) if candidate.limit > 0}

    def most_promising(self, rate: float) -> int | None:
        """The candidate to draft for next; None where none could make more than `rate` tokens a second of it all."""
        if not self._worths or self.expected + self._left <= rate * self._further:
            return None
        index = max(self._worths, key=self._worths.__getitem__)
        if self._worths[index] < rate and all(self._ceiling(other) < rate for other in self._worths):
            return None
        return index

    def add(self, index: int) -> float:
        """Draft one more token for a candidate; returns the tokens that it is expected to give."""
        candidate, position = self._candidates[index], self.counts[index]
        gain: float = candidate.probability ** (position + 1)
        price = self._price(candidate, position)
        self.expected += gain
        self._left -= gain
        self._rows += 1
        self._extra += price
        self.seconds = self._further + price
        self._further = self._target.at(self._rows + 1) + self._extra
        self.counts[index] += 1
        if candidate.model:
            self._join(position, _rows(candidate, position))
        if position + 1 < candidate.limit:
            self._worths[index] = self._worth(index)
        else:
            self._worths.pop(index, None)
        return gain

    def probe(self, chosen: list[int], index: int, n: int) -> tuple[float, float]:
        """What `n` more tokens for one candidate, beside the chosen ones, cost all slots and are expected to give, both
        in tokens.
        """
        for other, count in enumerate(chosen):
            for _ in range(count):
                self.add(other)
        seconds, rate = self.seconds, self.expected / self.seconds
        gain = sum(self.add(index) for _ in range(n))
        return (self.seconds - seconds) * rate, gain

    def _join(self, position: int, rows: int) -> None:
        """One more slot takes part in a step of the draft model; the first one makes it cheap for the others."""
        if position < len(self._drafting):
            self._drafting[position] += rows
            return
        self._drafting.append(rows)
        for other in self._worths:
            if self._candidates[other].model and self.counts[other] == position:
                self._worths[other] = self._worth(other)

    def _worth(self, index: int) -> float:
        """Expected tokens a second of a candidate's next token, as things are. Room counts even where rows are free."""
        candidate, position = self._candidates[index], self.counts[index]
        row, probability = self._next_row, candidate.probability
        if position > 0 or not candidate.overhead:
            return probability ** (position + 1) / (row + self._price(candidate, position))
        row += self._share if candidate.model else 0.0  # an overhead comes once, whatever the number of tokens
        return max(_expected(probability, n) / (candidate.overhead + n * row) for n in range(1, candidate.limit + 1))

    def _ceiling(self, index: int) -> float:
        """The same if all others share the cost of drafting it."""
        candidate = self._candidates[index]
        share = self._share if candidate.model else 0.0
        return candidate.probability ** (self.counts[index] + 1) / (self._row + share)

    def _price(self, candidate: Candidate, position: int) -> float:
        """Seconds of a slot's next token, apart from its row in the target."""
        price = candidate.overhead if position == 0 else 0.0
        if candidate.model:
            rows = self._drafting[position] if position < len(self._drafting) else 0
            price += self._draft.at(rows + _rows(candidate, position)) - self._draft.at(rows)
            if position == 0 and candidate.backlog > _USUAL_BACKLOG:
                price += self._draft.at(candidate.backlog) / self._rounds
        return price


def _rows(candidate: Candidate, position: int) -> int:
    """Of a slot in a step of the draft model. What it has missed beyond the usual is written off over many rounds."""
    return min(candidate.backlog, _USUAL_BACKLOG) if position == 0 else 1


def _expected(probability: float, n: int) -> float:
    """Accepted tokens of `n` drafted ones: p + p^2 + ... + p^n."""
    return float(n) if probability >= 1 else probability * (1 - probability**n) / (1 - probability)
