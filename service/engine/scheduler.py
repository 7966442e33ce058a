"""The plan of a step: who computes which tokens. Pure; it never sees a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from service.engine.batch import Segment
from service.engine.slots import Slot


@dataclass(frozen=True, slots=True)
class Plan:
    """The segments of one decode: `generating` of one row each come first, then `prompt_rows` rows of prompts."""

    segments: list[Segment]
    generating: int
    prompt_rows: int


def plan(slots: Iterable[Slot], prompt_rows: int) -> Plan:
    """One row for each generating slot, then at most `prompt_rows` of prompts.

    Prompts are served in the order in which they came to their slots, so that the first one is done soonest.
    """
    busy = [(slot, slot.sequence) for slot in slots if slot.sequence is not None]
    segments = [
        Segment(slot.id, (sequence.pending,), len(slot.tokens), output=True)
        for slot, sequence in busy
        if sequence.pending is not None
    ]
    generating, left = len(segments), prompt_rows
    prompts = [(slot, sequence) for slot, sequence in busy if sequence.pending is None]
    for slot, sequence in sorted(prompts, key=lambda pair: pair[0].used):
        if left <= 0:
            break
        start, prompt = len(slot.tokens), sequence.request.tokens
        chunk = prompt[start : start + left]
        segments.append(Segment(slot.id, chunk, start, output=start + len(chunk) == len(prompt)))
        left -= len(chunk)
    return Plan(segments, generating, prompt_rows - left if prompts else 0)
