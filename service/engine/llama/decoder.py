"""What the target and the draft model have in common: a model with its context, as the engine wants them."""

from __future__ import annotations

from collections.abc import Sequence

from service.engine.batch import DecodeStatus, Logits, Segment
from service.engine.llama.context import Context
from service.engine.llama.model import Model
from service.engine.types import ContextCheckpoint


class ContextDecoder:
    """Implements `engine.batch.Decoder` over a context, whose model it owns, too."""

    def __init__(self, model: Model, context: Context) -> None:
        self._model, self._context = model, context
        self.size, self.max_rows, self.max_outputs = context.size, context.max_rows, context.max_outputs

    def decode(self, segments: Sequence[Segment]) -> DecodeStatus:
        return self._context.decode(segments)

    def logits(self, index: int) -> Logits:
        return self._context.logits(index)

    def checkpoint(self, slot: int) -> bool:
        return self._context.checkpoint(slot)

    def keep(self, slot: int, length: int) -> int:
        return self._context.keep(slot, length)

    def add_context_checkpoint(self, slot: int) -> bool:
        return self._context.memory.add_context_checkpoint(slot)

    def context_checkpoints(self, slot: int) -> tuple[ContextCheckpoint, ...]:
        return self._context.memory.context_checkpoints(slot)

    def put_context_checkpoints(self, slot: int, checkpoints: Sequence[ContextCheckpoint]) -> None:
        self._context.memory.put_context_checkpoints(slot, checkpoints)

    def state_size(self, slot: int) -> int:
        return self._context.memory.state_size(slot)

    def state(self, slot: int, room: memoryview | None = None) -> memoryview:
        return self._context.memory.state(slot, room)

    def put_back(self, slot: int, state: memoryview, length: int) -> bool:
        return self._context.memory.put_back(slot, state, length)

    def close(self) -> None:
        self._context.close()
        self._model.close()
