"""Drafts from a model of its own, with one sequence for each slot. Pure: the model is behind `Decoder`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from service.engine.batch import Decoder, DecodeStatus, Logits, Segment
from service.engine.rowcost import RowCost
from service.engine.slots import common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """Up to `n` tokens after `text`, each with at least `p_min` of the draft's own probability."""

    slot: int
    text: Sequence[int]
    n: int
    p_min: float = 0.0


class DraftModel:
    """Drafts for all slots at once: one decode a step, in which each slot has one row.

    The memory of a slot holds a part of its text, or all of it and what was drafted behind it. `cost` learns from every
    step, by its rows: the decode, and the choice of the tokens.
    """

    def __init__(
        self, decoder: Decoder, slots: int, cost: RowCost, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._decoder, self._cost, self._clock = decoder, cost, clock
        self._held: list[list[int]] = [[] for _ in range(slots)]

    def open(self, slot: int, prompt: Sequence[int]) -> None:
        """A new text begins in `slot`; what its memory has in common with `prompt` is of use."""
        self.settle(slot, common_prefix(self._held[slot], prompt))

    def settle(self, slot: int, length: int) -> None:
        """The first `length` tokens of the text are decided; drop what was drafted behind them."""
        held = self._held[slot]
        if length < len(held):
            del held[self._decoder.keep(slot, length) :]

    def forget(self, slot: int) -> None:
        """Empty the memory of `slot`."""
        if self._held[slot]:
            self._decoder.keep(slot, 0)
            self._held[slot].clear()

    def state_size(self, slot: int) -> int:
        """Bytes of what `state` gives."""
        return self._decoder.state_size(slot) if self._held[slot] else 0

    def state(self, slot: int, room: memoryview | None) -> tuple[int, memoryview] | None:
        """How many tokens of the text are in the memory of `slot`, and their state; None where there are none."""
        held = len(self._held[slot])
        return (held, self._decoder.state(slot, room)) if held else None

    def put_back(self, slot: int, tokens: Sequence[int], state: memoryview) -> bool:
        """Take a state over that is the one of `tokens`. Returns False where it does not fit, and the slot is empty."""
        self.forget(slot)
        if not self.has_room(slot, len(tokens)) or not self._decoder.put_back(slot, state, len(tokens)):
            return False
        self._held[slot] = list(tokens)
        return True

    def backlog(self, slot: int, length: int) -> int:
        """Tokens of a text of `length` tokens that are not in the memory yet."""
        return length - len(self._held[slot])

    def has_room(self, slot: int, length: int) -> bool:
        """Whether a text of `length` tokens, its draft included, has room beside those of the other slots."""
        others = sum(len(held) for index, held in enumerate(self._held) if index != slot)
        return others + length <= self._decoder.size

    def catch_up(self, slot: int, text: Sequence[int], rows: int) -> None:
        """Compute up to `rows` tokens of `text` that are not in the memory yet."""
        end = len(self._held[slot]) + rows
        while (start := len(self._held[slot])) < end:
            chunk = text[start : min(end, start + self._decoder.max_rows)]
            began = self._clock()
            if not chunk or not self._decode([Segment(slot, chunk, start)]):
                break
            self._cost.observe(len(chunk), self._clock() - began)

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        """A draft for each wish, shorter or empty where the model is unsure or out of room."""
        drafts: list[list[int]] = [[] for _ in wishes]
        live = list(range(len(wishes)))
        segments = self._unread(wishes)
        began = self._clock()
        if sum(len(segment.tokens) for segment in segments) > self._decoder.max_rows:  # a decode of them failed
            return drafts
        while live and self._decode(segments):
            if not any(drafts):
                for wish in wishes:
                    self._decoder.checkpoint(wish.slot)
            live = [
                index
                for output, index in enumerate(live)
                if self._draw(wishes[index], drafts[index], self._decoder.logits(output))
            ]
            rows, ended = sum(len(segment.tokens) for segment in segments), self._clock()
            self._cost.observe(rows, ended - began)
            began = ended
            segments = [
                Segment(wishes[index].slot, drafts[index][-1:], len(self._held[wishes[index].slot]), outputs=1)
                for index in live
            ]
        return drafts

    def _unread(self, wishes: Sequence[Wish]) -> list[Segment]:
        """The rows up to the end of each text, of which at least the last one has to be computed. Where they are too
        many for one decode, the longest are computed but for that one.
        """
        for wish in wishes:
            self.settle(wish.slot, len(wish.text) - 1)
        rows = {wish: self.backlog(wish.slot, len(wish.text)) for wish in wishes}
        for wish in sorted(rows, key=rows.__getitem__, reverse=True):
            if sum(rows.values()) <= self._decoder.max_rows:
                break
            self.catch_up(wish.slot, wish.text, rows[wish] - 1)
            rows[wish] = 1
        held = [len(self._held[wish.slot]) for wish in wishes]
        return [
            Segment(wish.slot, wish.text[start:], start, outputs=1) for wish, start in zip(wishes, held, strict=True)
        ]

    def _draw(self, wish: Wish, draft: list[int], logits: Logits) -> bool:
        """Add the likeliest token to a draft; returns whether it goes on."""
        token = int(logits.argmax())
        if wish.p_min > 0 and _probability(logits, token) < wish.p_min:
            return False
        draft.append(token)
        return len(draft) < wish.n

    def _decode(self, segments: Sequence[Segment]) -> bool:
        """Returns False where that failed; the slots in it are empty then."""
        status = self._decoder.decode(segments)
        while status is DecodeStatus.NO_ROOM and self._make_room({segment.slot for segment in segments}):
            status = self._decoder.decode(segments)
        if status is not DecodeStatus.OK:
            for segment in segments:
                self._decoder.keep(segment.slot, 0)
                self._held[segment.slot].clear()
            return False
        for segment in segments:
            self._held[segment.slot].extend(segment.tokens)
        return True

    def _make_room(self, needed: set[int]) -> bool:
        """Empty the fullest of the slots that are not needed; returns False where there is none."""
        others = [slot for slot, held in enumerate(self._held) if held and slot not in needed]
        if not others:
            return False
        self.forget(max(others, key=lambda slot: len(self._held[slot])))
        return True


def _probability(logits: Logits, token: int) -> float:
    return float(1.0 / np.exp(logits - logits[token]).sum())
