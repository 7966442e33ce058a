"""The plan of a step: who computes which tokens. Pure; it never sees a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.engine.batch import Segment
from service.engine.slots import Slot

TAIL = 4
"""Tokens of a prompt that are computed after the last context checkpoint in it."""
LEAST_PROMPT = 64
"""Tokens; shorter prompts are computed at once."""

Drafts = Mapping[int, Sequence[int]]
"""Drafted tokens by slot."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The segments of one decode: those of `generating` slots first, then the replays of idle ones, then `prompt_rows`
    rows of prompts.
    """

    segments: list[Segment]
    generating: int
    prompt_rows: int

    @property
    def rows(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)


def plan(slots: Sequence[Slot], prompt_rows: int, max_rows: int, drafts: Drafts, *, pausing: bool = False) -> Plan:
    """For each generating slot its replay, its newest token and its draft, for each idle one its replay, then at most
    `prompt_rows` of prompts; all in all at most `max_rows` rows.

    With `pausing` a chunk ends shortly before its prompt does, so that a context checkpoint can be taken there.
    Prompts are served in the order in which they came to their slots, so that the first one is done soonest.
    """
    generating = [slot for slot in slots if slot.sequence is not None and slot.sequence.pending is not None]
    room = max_rows - len(generating) - sum(map(len, drafts.values()))
    segments = []
    for slot in generating:
        segments.append(_round(slot, drafts.get(slot.id, ()), room))
        room -= min(len(slot.replay), room)
    for slot in slots:
        if slot.replay and slot.sequence is None and room > 0:
            segments.append(Segment(slot.id, slot.replay[:room], len(slot.tokens)))
            room -= len(segments[-1].tokens)
    prompts = [slot for slot in slots if slot.sequence is not None and slot.sequence.pending is None]
    left = share = min(room, prompt_rows)
    for slot in sorted(prompts, key=lambda slot: slot.used):
        if left <= 0:
            break
        assert slot.sequence is not None
        start, reading = len(slot.tokens), slot.sequence.reading
        end = _pause(start, len(reading)) if pausing else len(reading)
        chunk = reading[start : min(start + left, end)]
        drawn_from = start + len(chunk) == len(reading) and not slot.sequence.resumed
        segments.append(Segment(slot.id, chunk, start, outputs=int(drawn_from)))
        left -= len(chunk)
    return Plan(segments, len(generating), share - left)


def _pause(start: int, length: int) -> int:
    """Where a chunk of a prompt ends at the latest: a context checkpoint shortly before its end is of use to a prompt
    that goes on in another way.
    """
    before = length - TAIL
    return before if length > LEAST_PROMPT and start < before else length


def _round(slot: Slot, draft: Sequence[int], room: int) -> Segment:
    """The rows of a generating slot; where there is no room for its whole replay, a part of that alone."""
    assert slot.sequence is not None
    assert slot.sequence.pending is not None
    start = len(slot.tokens)
    if len(slot.replay) > room:
        return Segment(slot.id, slot.replay[: room + 1 + len(draft)], start)
    return Segment(slot.id, (*slot.replay, slot.sequence.pending, *draft), start, outputs=1 + len(draft))
