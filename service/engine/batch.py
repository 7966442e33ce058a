"""What the engine asks of whatever computes: the rows of one decode, and the few operations on a slot's memory.

The scheduler and the core know only this; `engine/llama` does it with llama.cpp, `engine/fake` with arithmetic.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from service.engine.types import ContextCheckpoint, ModelInfo, Request

Logits = npt.NDArray[np.float32]
"""Raw scores of one row, shape [vocabulary]."""


@dataclass(slots=True)
class Segment:
    """Consecutive rows of one slot: `tokens` at positions `start`, `start + 1`, ...

    The logits of the last `outputs` rows are wanted.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    outputs: int = 0


class DecodeStatus(enum.Enum):
    OK = "ok"
    NO_ROOM = "no_room"
    """The cache has no place for the rows; nothing was changed."""
    FAILED = "failed"
    """The library failed; the memory of the slots in the batch is undefined."""


class Sampler(Protocol):
    """Draws the tokens of one request and remembers what it needs for the next draw."""

    def draw(self, logits: Logits) -> int:
        """The next token. Raises EngineFailure where nothing may follow (a grammar at a dead end)."""

    @property
    def draws(self) -> int:
        """How often it has taken random numbers."""

    def resume(self, tokens: Sequence[int], draws: int) -> None:
        """Be as if `tokens` had been drawn, with so many draws. To be called before the first draw."""

    def close(self) -> None:
        """Free what it holds; may be called more than once."""


class Decoder(Protocol):
    """Computes rows of one model and keeps the memory of the slots. Used by the engine's thread alone."""

    @property
    def size(self) -> int:
        """Tokens that all slots hold together."""

    @property
    def max_rows(self) -> int:
        """The most rows of one decode; more than there are slots."""

    @property
    def max_outputs(self) -> int:
        """The most rows of one decode whose logits can be wanted."""

    def decode(self, segments: Sequence[Segment]) -> DecodeStatus:
        """Compute all rows. The rows of one segment stay together and in order."""

    def logits(self, index: int) -> Logits:
        """Of the index-th row with an output in the last decode; valid until the next decode."""

    def checkpoint(self, slot: int) -> bool:
        """Make sure that `keep` can come back to where `slot` is now, also after the next decode. One for each slot:
        it takes the place of the one before. Returns False where nothing had to be done for that.
        """

    def keep(self, slot: int, length: int) -> int:
        """Drop the tokens of `slot` from position `length` on. Returns how many are left: `length`, or fewer where the
        memory can only go back to a checkpoint; 0 where it cannot go back at all and was emptied.
        """

    def add_context_checkpoint(self, slot: int) -> bool:
        """Keep a copy in host memory of what cannot go back, so that `keep` can come back to where `slot` is now as
        long as its tokens up to here stay. Returns False where that is not needed, or not wanted.
        """

    def context_checkpoints(self, slot: int) -> tuple[ContextCheckpoint, ...]:
        """Those of a slot, the shortest first."""

    def put_context_checkpoints(self, slot: int, checkpoints: Sequence[ContextCheckpoint]) -> None:
        """Take checkpoints over that belong to the state that `put_back` brought, and have been checked."""

    def state_size(self, slot: int) -> int:
        """Bytes of the state of a slot."""

    def state(self, slot: int, room: memoryview | None = None) -> memoryview:
        """The state of a slot as bytes: a copy, with llama.cpp's prefix, in `room` if that is large enough. Raises
        EngineFailure.
        """

    def put_back(self, slot: int, state: memoryview, length: int) -> bool:
        """Replace what a slot holds by a state of `length` tokens, which has been checked. Returns False where it does
        not fit; the slot is empty then.
        """

    def close(self) -> None:
        """Free the model and its memory."""


class Runner(Decoder, Protocol):
    """The target, and the draft model where there is one."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def draft(self) -> Decoder | None: ...

    @property
    def end_tokens(self) -> frozenset[int]: ...

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes that each token adds to a text."""


class MakeSampler(Protocol):
    """Makes a request's sampler; callable from any thread. Raises InvalidRequest (a grammar that cannot be used)."""

    def __call__(self, request: Request) -> Sampler: ...
