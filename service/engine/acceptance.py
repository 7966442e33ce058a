"""What is accepted of the drafts for a slot, and when drafting is tried again after it did not pay.

Nothing here has a clock or draws random numbers.
"""

from __future__ import annotations

import math

_OPTIMISM = 0.75  # the acceptance that is assumed before anything was seen
_PRIOR_TRIALS = 2.0  # what that, or the record of similar drafts, counts
_MEMORY = 64.0  # trials
_CHANGE = 0.3  # more than the latest acceptance differs from the usual one by chance
_DOUBTED = 8.0  # trials that are left when drafting is tried again after a pause
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024  # generated tokens
_PROBE_LOSS = 0.01  # of the tokens generated in the pause is what a probe may cost


class Acceptance:
    """The probability that a drafted token is accepted if all before it were.

    Each token up to the first rejected one is a trial; a draft accepted in full has seen no failure, only the end of
    the draft. Old trials are forgotten exponentially, and at once where the latest ones tell something else. `prior` is
    the record of similar drafts (of the source in all slots, say), which counts as long as there is little of its own;
    without one the start is optimistic, to be tried.
    """

    def __init__(self, prior: Acceptance | None = None, memory: float = _MEMORY) -> None:
        """`memory` is the number of trials after which one has lost 63 % of its weight."""
        self._prior, self._memory = prior, memory
        self._trials = self._accepted = 0.0
        self._latest_trials = self._latest_accepted = 0.0
        """The same with a quarter of the memory."""

    @property
    def probability(self) -> float:
        expected = self._prior.probability if self._prior else _OPTIMISM
        return (self._accepted + _PRIOR_TRIALS * expected) / (self._trials + _PRIOR_TRIALS)

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from one verified draft, here and in the priors."""
        trials = accepted + (accepted < drafted)
        kept = math.exp(-trials / self._memory)
        self._trials = self._trials * kept + trials
        self._accepted = self._accepted * kept + accepted
        kept **= 4
        self._latest_trials = self._latest_trials * kept + trials
        self._latest_accepted = self._latest_accepted * kept + accepted
        change = self._latest_accepted / max(self._latest_trials, 1) - self._accepted / max(self._trials, 1)
        if abs(change) > _CHANGE:
            self._trials, self._accepted = self._latest_trials, self._latest_accepted
        if self._prior:
            self._prior.observe(drafted, accepted)

    def doubt(self) -> None:
        """Let little remain of what is known, since it is old."""
        if self._trials > _DOUBTED:
            self._accepted *= _DOUBTED / self._trials
            self._trials = _DOUBTED


class Track:
    """The record of one source of drafts in one slot: what was accepted, and when it is tried again.

    A draft that does not pay is probed after 16 generated tokens, then 32, 64, ... up to 1024, and not before the probe
    is expected to cost less than 1 % of the tokens generated since the last draft. One that is accepted in full is
    followed by another, as long as that budget lasts. As soon as drafting pays, the pauses begin anew.
    """

    def __init__(self, prior: Acceptance | None = None) -> None:
        self.probing = False
        """Whether the last choice was a probe."""
        self._acceptance = Acceptance(prior)
        self._matches: dict[int, Acceptance] = {}
        self._pause = self._due_at = _FIRST_PAUSE
        self._waited = 0  # tokens generated since the last draft, apart from probes accepted in full
        self._cost = self._spent = 0.0  # tokens: of the last probe, of all those that were accepted in full

    @property
    def due(self) -> bool:
        """Whether it is time for a probe."""
        return self._waited >= self._due_at

    def probe(self, cost: float, gain: float) -> bool:
        """Decide about a probe that is due, by what it costs and its expected gain, both in tokens."""
        self.probing, self._cost = self._spent + cost - gain <= _PROBE_LOSS * self._waited, cost
        if not self.probing:
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
            self._spent += self._cost - accepted
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
