"""Slots, and which of them a request gets."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import numpy as np

from service.engine.sequence import Sequence
from service.engine.types import Paused, SlotInfo, SlotState


@dataclass(slots=True, eq=False)
class Slot:
    """One seat of the engine. `tokens` are those whose state the memory holds, `replay` the ones behind them whose
    state has to be computed again.
    """

    id: int
    tokens: list[int] = field(default_factory=list)
    replay: list[int] = field(default_factory=list)
    cache_key: str = ""
    session: str | None = None
    sequence: Sequence | None = None
    last_sequence: Sequence | None = None
    """The one before, for the counts that a watcher sees."""
    used: int = 0
    """Grows with each use, so that the least recently used slot has the smallest."""
    last_used: float | None = None
    """Seconds since the epoch."""
    paused: Paused | None = None
    """A generation that was restored with the slot and can go on."""
    marked: int = 0
    """Tokens at the last context checkpoint of the prompt that is read."""

    @property
    def busy(self) -> bool:
        return self.sequence is not None

    @property
    def length(self) -> int:
        """Tokens that the memory holds, or is about to hold again."""
        return len(self.tokens) + len(self.replay)

    @property
    def state(self) -> SlotState:
        if self.sequence is None:
            return SlotState.IDLE
        return SlotState.PROMPT if self.sequence.pending is None else SlotState.GENERATING

    def common_prefix(self, sequence: Sequence) -> int:
        """Tokens at the start of what a sequence reads whose state the slot holds; one is left to compute, so that the
        next one can be drawn from it, unless that was done before.
        """
        request, reading = sequence.request, sequence.reading
        if not request.reuse_prefix or request.cache_key != self.cache_key:
            return 0
        return min(common_prefix(self.tokens, reading), len(reading) - (not sequence.resumed))

    def info(self, context: int) -> SlotInfo:
        sequence = self.sequence or self.last_sequence
        return SlotInfo(
            id=self.id,
            state=self.state,
            cached_tokens=len(self.tokens),
            prompt_tokens=len(sequence.request.tokens) if sequence else 0,
            reused_tokens=sequence.reused if sequence else 0,
            generated_tokens=sequence.generated if sequence else 0,
            context_tokens=context,
            session=self.session,
            request_id=self.sequence.request.id if self.sequence else None,
            last_used=self.last_used,
        )


def common_prefix(left: Tokens[int], right: Tokens[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(left), len(right))
    if length == 0 or left[0] != right[0]:
        return 0
    differs = np.flatnonzero(np.asarray(left[:length]) != np.asarray(right[:length]))
    return int(differs[0]) if len(differs) else length


def choose(slots: Tokens[Slot], sequence: Sequence) -> Slot | None:
    """The slot for a sequence, or None where it has to wait.

    In this order: the slot it asks for; the slot of its session; the idle slot with the longest common prefix, if at
    least half of what that slot holds is of use (or else a conversation that continues would pay for one that merely
    begins alike); the least recently used idle slot, an empty one first.
    """
    request = sequence.request
    if request.slot_id is not None:
        asked = slots[request.slot_id]
        return None if asked.busy else asked
    if request.session is not None:
        for slot in slots:
            if slot.session == request.session and slot.cache_key == request.cache_key:
                return None if slot.busy else slot
    idle = [slot for slot in slots if not slot.busy]
    if not idle:
        return None
    prefix, best = max(
        ((slot.common_prefix(sequence), slot) for slot in idle), key=lambda pair: (pair[0], pair[1].used)
    )
    if prefix and 2 * prefix >= len(best.tokens):
        return best
    return min(idle, key=lambda slot: (len(slot.tokens) > 0, slot.used))
