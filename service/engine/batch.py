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

from service.engine.types import ModelInfo, Request

Logits = npt.NDArray[np.float32]
"""Raw scores of one row, shape [vocabulary]."""


@dataclass(slots=True)
class Segment:
    """Consecutive rows of one slot: `tokens` at positions `start`, `start + 1`, ...

    With `output`, the last row's logits are wanted.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    output: bool


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

    def close(self) -> None:
        """Free what it holds; may be called more than once."""


class Runner(Protocol):
    """Computes rows and keeps the memory of the slots. Used by the engine's thread alone."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def end_tokens(self) -> frozenset[int]: ...

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes that each token adds to a text."""

    @property
    def max_rows(self) -> int:
        """The most rows of one decode; more than there are slots."""

    def decode(self, segments: Sequence[Segment]) -> DecodeStatus:
        """Compute all rows. The rows of one segment stay together and in order."""

    def logits(self, index: int) -> Logits:
        """Of the index-th segment with `output` in the last decode; valid until the next decode."""

    def keep(self, slot: int, length: int) -> int:
        """Drop all tokens of `slot` from position `length` on. Returns how many are left: `length`, or 0 where the
        memory cannot go back there, in which case it was emptied.
        """

    def close(self) -> None:
        """Free the model and its memory."""


class MakeSampler(Protocol):
    """Makes a request's sampler; callable from any thread. Raises InvalidRequest (a grammar that cannot be used)."""

    def __call__(self, request: Request) -> Sampler: ...
