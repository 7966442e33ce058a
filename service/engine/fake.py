"""A runner that needs no model: its text follows from arithmetic, and its failures can be ordered.

The next token depends on all tokens of the slot, so that a wrong position, a lost token or a mix-up of slots changes
the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.engine.batch import DecodeStatus, Logits, Segment
from service.engine.types import Capabilities, ModelInfo

END = 0
"""The end-of-text token."""


class FakeRunner:
    """Implements `engine.batch.Runner` over `vocabulary` tokens whose pieces are ASCII letters.

    `capacity` is the room for tokens over all slots. With `trim` False a slot can only be emptied, as with recurrent
    models. `statuses` are given out, one for each decode, before any is computed.
    """

    def __init__(
        self, *, slots: int = 2, capacity: int = 64, slot_context: int = 32, vocabulary: int = 64, trim: bool = True
    ) -> None:
        self.info = ModelInfo(
            name="fake",
            description="arithmetic",
            architecture="fake",
            parameters=0,
            size_bytes=0,
            vocabulary_size=vocabulary,
            embedding_size=1,
            layers=1,
            trained_context=slot_context,
            context=capacity,
            slot_context=slot_context,
            slots=slots,
            capabilities=Capabilities(trim=trim, recurrent=False, hybrid=not trim, sliding_window=0),
            chat_template=None,
        )
        self.end_tokens = frozenset({END})
        self.pieces = [b"" if token == END else bytes([97 + token % 26]) for token in range(vocabulary)]
        self.max_rows = 16
        self.memory: dict[int, list[int]] = {}
        self.decoded: list[list[Segment]] = []
        self.statuses: list[DecodeStatus] = []
        self.closed = False
        self._outputs: list[Logits] = []

    def decode(self, segments: Sequence[Segment]) -> DecodeStatus:
        rows = sum(len(segment.tokens) for segment in segments)
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"{rows} rows")
        if self.statuses:
            return self.statuses.pop(0)
        if sum(map(len, self.memory.values())) + rows > self.info.context:
            return DecodeStatus.NO_ROOM
        self.decoded.append(list(segments))
        self._outputs = []
        for segment in segments:
            memory = self.memory.setdefault(segment.slot, [])
            if segment.start != len(memory):
                raise ValueError(f"slot {segment.slot}: position {segment.start} after {len(memory)} tokens")
            memory.extend(segment.tokens)
            if segment.output:
                self._outputs.append(self._score(memory))
        return DecodeStatus.OK

    def logits(self, index: int) -> Logits:
        return self._outputs[index]

    def keep(self, slot: int, length: int) -> int:
        kept = length if self.info.capabilities.trim else 0
        self.memory[slot] = self.memory.get(slot, [])[:kept]
        return kept

    def close(self) -> None:
        self.closed = True

    def expected(self, prompt: Sequence[int], count: int) -> list[int]:
        """The first `count` greedy tokens after `prompt`; fewer where the text ends."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self._score(tokens).argmax()))
            if tokens[-1] == END:
                break
        return tokens[len(prompt) :]

    def _score(self, tokens: Sequence[int]) -> Logits:
        total = sum((index + 1) * (token + 7) for index, token in enumerate(tokens))
        scores = np.zeros(self.info.vocabulary_size, np.float32)
        scores[1 + total % (self.info.vocabulary_size - 1)] = 1.0
        return scores
