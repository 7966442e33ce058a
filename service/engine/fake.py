"""A runner that needs no model: its text follows from arithmetic, and its failures can be ordered.

The next token depends on all tokens of the slot, so that a wrong position, a lost token or a mix-up of slots changes
the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.engine.batch import DecodeStatus, Logits, Segment
from service.engine.types import Capabilities, ContextCheckpoint, ModelInfo, Rollback

END = 0
"""The end-of-text token."""


class FakeDecoder:
    """Implements `engine.batch.Decoder` over `vocabulary` tokens.

    `size` is the room for tokens over all slots. With `trim` False a slot can only go back to its checkpoint, as with
    recurrent models. `wrong_every` makes each such token of a text another one than that of a decoder without it.
    `statuses` are given out, one for each decode, before any is computed.
    """

    max_rows = 16

    def __init__(self, *, size: int = 64, vocabulary: int = 64, trim: bool = True, wrong_every: int = 0) -> None:
        self.size = size
        self.max_outputs = self.max_rows
        self.memory: dict[int, list[int]] = {}
        self.checkpoints: dict[int, list[int]] = {}
        self.decoded: list[list[Segment]] = []
        self.statuses: list[DecodeStatus] = []
        self.closed = False
        self._vocabulary, self._trim, self._wrong_every = vocabulary, trim, wrong_every
        self._outputs: list[Logits] = []

    def decode(self, segments: Sequence[Segment]) -> DecodeStatus:
        rows = sum(len(segment.tokens) for segment in segments)
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"{rows} rows")
        if self.statuses:
            return self.statuses.pop(0)
        if sum(map(len, self.memory.values())) + rows > self.size:
            return DecodeStatus.NO_ROOM
        self.decoded.append([Segment(s.slot, tuple(s.tokens), s.start, s.outputs) for s in segments])
        self._outputs = []
        for segment in segments:
            memory = self.memory.setdefault(segment.slot, [])
            if segment.start != len(memory):
                raise ValueError(f"slot {segment.slot}: position {segment.start} after {len(memory)} tokens")
            for index, token in enumerate(segment.tokens, segment.outputs - len(segment.tokens)):
                memory.append(token)
                if index >= 0:
                    self._outputs.append(self._score(memory))
        return DecodeStatus.OK

    def logits(self, index: int) -> Logits:
        return self._outputs[index]

    def checkpoint(self, slot: int) -> bool:
        if self._trim or self.checkpoints.get(slot) == self.memory[slot]:
            return False
        self.checkpoints[slot] = list(self.memory[slot])
        return True

    def keep(self, slot: int, length: int) -> int:
        memory = self.memory.get(slot, [])
        if not self._trim and length < len(memory):
            known = self.checkpoints.get(slot, [])
            usable = len(known) <= length and memory[: len(known)] == known
            length = len(known) if usable else 0
        self.memory[slot] = memory[:length]
        if length == 0:
            self.checkpoints.pop(slot, None)
        return len(self.memory[slot])

    def add_context_checkpoint(self, slot: int) -> bool:
        return False

    def context_checkpoints(self, slot: int) -> tuple[ContextCheckpoint, ...]:
        return ()

    def put_context_checkpoints(self, slot: int, checkpoints: Sequence[ContextCheckpoint]) -> None:
        """There are none."""

    def state_size(self, slot: int) -> int:
        return 4 * len(self.memory.get(slot, []))

    def state(self, slot: int, room: memoryview | None = None) -> memoryview:
        return np.array(self.memory.get(slot, []), np.int32).data.cast("B")

    def put_back(self, slot: int, state: memoryview, length: int) -> bool:
        self.keep(slot, 0)
        tokens = np.frombuffer(state, np.int32).tolist()
        if len(tokens) != length or sum(map(len, self.memory.values())) + length > self.size:
            return False
        self.memory[slot] = tokens
        return True

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
        total = len(tokens) ** 2 + sum((index + 1) * (token + 7) for index, token in enumerate(tokens))
        if self._wrong_every and len(tokens) % self._wrong_every == 0:
            total += 1
        scores = np.zeros(self._vocabulary, np.float32)
        scores[1 + total % (self._vocabulary - 1)] = 1.0
        return scores


class FakeRunner(FakeDecoder):
    """Implements `engine.batch.Runner`; the pieces of its tokens are letters. `capacity` is the decoder's size."""

    def __init__(
        self,
        *,
        slots: int = 2,
        capacity: int = 64,
        slot_context: int = 32,
        vocabulary: int = 64,
        trim: bool = True,
        draft: FakeDecoder | None = None,
    ) -> None:
        super().__init__(size=capacity, vocabulary=vocabulary, trim=trim)
        self.draft = draft
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
            capabilities=Capabilities(
                trim=trim,
                recurrent=False,
                hybrid=not trim,
                sliding_window=0,
                rollback=Rollback.TRIM if trim else Rollback.CHECKPOINT,
            ),
            chat_template=None,
        )
        self.end_tokens = frozenset({END})
        self.pieces = [b"" if token == END else bytes([97 + token % 26]) for token in range(vocabulary)]
