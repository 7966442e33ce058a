"""The memory of a context's sequences: how the end of one is dropped.

What llama.cpp would abort on is checked here before the call: putting a checkpoint back where there is none, or bytes
that are not one. What it gets wrong without saying so, too: it offers recurrent snapshots of tokens that were not in
the last decode.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from service.engine.batch import Segment
from service.engine.llama.cells import Cells
from service.engine.types import ContextCheckpoint, Rollback
from service.errors import EngineFailure

_PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_CHECKPOINT = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | llama_cpp.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """`length` is that of the sequence, `data` what the library wants back; the tensors stay on the device."""

    length: int
    data: Any


class Memory:
    """Sequences by their numbers; positions are those of tokens. Not thread-safe.

    `window` is that of sliding-window layers, 0 where there are none; `snapshots` the number of tokens whose recurrent
    states are kept. Of context checkpoints each sequence has up to `most_copies`, of `copied_bytes` together.

    Source: `llama_memory_seq_*` and `llama_state_seq_*_ext` of llama.h.
    """

    def __init__(
        self,
        context: Any,
        rollback: Rollback,
        *,
        window: int = 0,
        snapshots: int = 0,
        most_copies: int = 0,
        copied_bytes: int = 0,
    ) -> None:
        self._context = context
        self._handle = llama_cpp.llama_get_memory(context)
        self._rollback, self._window, self._snapshots = rollback, window, snapshots
        self._most_copies, self._copied_bytes = most_copies, copied_bytes
        self._checkpoints: dict[int, _Checkpoint] = {}
        self._copies: dict[int, list[ContextCheckpoint]] = {}
        """Context checkpoints, in host memory, the shortest first."""
        self._fresh: dict[int, int] = {}
        """Tokens that each sequence had in the last decode."""
        self.cells: Cells | None = None
        """Kept up to date, where their order matters."""

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        last: int = llama_cpp.llama_memory_seq_pos_max(self._handle, sequence)
        return last + 1

    def total(self, sequences: int) -> int:
        """Tokens of the first `sequences` sequences together."""
        return sum(map(self.length, range(sequences)))

    def decoded(self, segments: Sequence[Segment]) -> None:
        """To be called after each decode."""
        if self._snapshots:
            self._fresh = {segment.slot: len(segment.tokens) for segment in segments}

    def checkpoint(self, sequence: int) -> bool:
        """Copy the part of a sequence that cannot be dropped, on the device. Returns False where that is not needed."""
        if self._rollback is not Rollback.CHECKPOINT:
            return False
        length, known = self.length(sequence), self._checkpoints.get(sequence)
        if length <= 0 or (known is not None and known.length == length):
            return False
        size = llama_cpp.llama_state_seq_get_size_ext(self._context, sequence, _CHECKPOINT)
        data = (ctypes.c_uint8 * size)()
        self._checkpoints.pop(sequence, None)
        if llama_cpp.llama_state_seq_get_data_ext(self._context, data, size, sequence, _CHECKPOINT) != size:
            raise EngineFailure("a checkpoint could not be taken", reason="CHECKPOINT_FAILED")
        self._checkpoints[sequence] = _Checkpoint(length, data)
        return True

    def keep(self, sequence: int, length: int) -> int:
        """Drop the tokens from position `length` on. Returns how many are left: `length`; or fewer, those of the
        checkpoint; or 0, where the sequence had to be emptied.
        """
        end = self.length(sequence)
        if length >= end > 0:
            return end
        if length > 0 and self._can_drop(sequence, end, length) and self._remove(sequence, length):
            self._invalidate(sequence, length)
            return length
        if length > 0 and (kept := self._go_back(sequence, length)):
            self._invalidate(sequence, kept)
            return kept
        self.clear(sequence)
        return 0

    def add_context_checkpoint(self, sequence: int) -> bool:
        """Copy what cannot go back to host memory. Older copies make room for it, but for the first one."""
        copies = self._copies.setdefault(sequence, [])
        length = self.length(sequence)
        if not self._most_copies or (self._rollback is Rollback.TRIM and not self._window) or length <= 0:
            return False
        if copies and copies[-1].length >= length:
            return False
        size = int(llama_cpp.llama_state_seq_get_size_ext(self._context, sequence, _PARTIAL))
        data = np.empty(size, np.uint8)
        got = llama_cpp.llama_state_seq_get_data_ext(self._context, _pointer(data), size, sequence, _PARTIAL)
        if size > self._copied_bytes or got != size:
            return False
        copies.append(ContextCheckpoint(length, data.data))
        while len(copies) > self._most_copies or sum(len(copy.data) for copy in copies) > self._copied_bytes:
            del copies[min(1, len(copies) - 2)]
        return True

    def context_checkpoints(self, sequence: int) -> tuple[ContextCheckpoint, ...]:
        return tuple(self._copies.get(sequence, ()))

    def put_context_checkpoints(self, sequence: int, checkpoints: Sequence[ContextCheckpoint]) -> None:
        """Checked copies that belong to what the sequence holds now."""
        kept: list[ContextCheckpoint] = []
        left = self._copied_bytes
        for copy in sorted(checkpoints, key=lambda copy: copy.length, reverse=True):
            if len(kept) < self._most_copies and copy.length <= self.length(sequence) and len(copy.data) <= left:
                kept.insert(0, copy)
                left -= len(copy.data)
        self._copies[sequence] = kept

    def clear(self, sequence: int) -> None:
        """Empty a sequence."""
        self._checkpoints.pop(sequence, None)
        self._copies.pop(sequence, None)
        self._remove(sequence, 0)

    def state_size(self, sequence: int) -> int:
        """Bytes of the whole state of a sequence."""
        return int(llama_cpp.llama_state_seq_get_size_ext(self._context, sequence, 0))

    def state(self, sequence: int, room: memoryview | None = None) -> memoryview:
        """The whole state of a sequence, in `room` if that is large enough. Raises EngineFailure."""
        size = self.state_size(sequence)
        data = np.empty(size, np.uint8) if room is None or len(room) < size else np.frombuffer(room, np.uint8)[:size]
        if llama_cpp.llama_state_seq_get_data_ext(self._context, _pointer(data), size, sequence, 0) != size:
            raise EngineFailure("the state of a slot could not be read", reason="STATE_FAILED")
        return data.data

    def put_back(self, sequence: int, state: memoryview, length: int) -> bool:
        """Replace a sequence by a state of `length` tokens; returns False where it is empty afterwards instead."""
        self.clear(sequence)
        data = np.frombuffer(state, np.uint8)
        read = llama_cpp.llama_state_seq_set_data_ext(self._context, _pointer(data), len(data), sequence, 0)
        if self.cells is not None:
            self.cells.place(sequence, length)
        if read == len(data) and self.length(sequence) == length:
            return True
        self.clear(sequence)
        return False

    def move(self, sequence: int) -> None:
        """Put a sequence into the lowest cells that are free. Raises EngineFailure where it is lost."""
        checkpoint, copies = self._checkpoints.get(sequence), self._copies.get(sequence, [])
        if not self.put_back(sequence, self.state(sequence), self.length(sequence)):
            raise EngineFailure("a sequence could not be moved in the cache", reason="MOVE_FAILED")
        self._copies[sequence] = copies
        if checkpoint is not None:
            self._checkpoints[sequence] = checkpoint

    def _can_drop(self, sequence: int, end: int, length: int) -> bool:
        match self._rollback:
            case Rollback.TRIM:
                return not self._window_lost(sequence, length)
            case Rollback.SNAPSHOTS:
                return end - length < min(self._fresh.get(sequence, 0), self._snapshots + 1)
            case Rollback.CHECKPOINT:
                return False

    def _go_back(self, sequence: int, length: int) -> int:
        """Put the newest checkpoint of a sequence back that is not behind `length`; returns its length, or 0."""
        known = self._checkpoints.get(sequence)
        copies = [copy for copy in self._copies.get(sequence, ()) if copy.length <= length]
        if known is not None and known.length <= length and (not copies or known.length >= copies[-1].length):
            point, pointer, size, flags = known.length, known.data, len(known.data), _CHECKPOINT
        elif copies:
            data = np.frombuffer(copies[-1].data, np.uint8)
            point, pointer, size, flags = copies[-1].length, _pointer(data), len(data), _PARTIAL
        else:
            return 0
        if llama_cpp.llama_state_seq_set_data_ext(self._context, pointer, size, sequence, flags) != size:
            return 0
        # the attention part is no part of the checkpoint
        return point if self._remove(sequence, point) and self.length(sequence) == point else 0

    def _invalidate(self, sequence: int, length: int) -> None:
        """A checkpoint of tokens that are no longer there is of no use."""
        known = self._checkpoints.get(sequence)
        if known is not None and known.length > length:
            del self._checkpoints[sequence]
        copies = self._copies.get(sequence)
        if copies and copies[-1].length > length:
            self._copies[sequence] = [copy for copy in copies if copy.length <= length]

    def _remove(self, sequence: int, start: int) -> bool:
        """A whole sequence can always go."""
        if not llama_cpp.llama_memory_seq_rm(self._handle, sequence, start, -1):
            return False
        self._fresh.pop(sequence, None)
        if self.cells is not None:
            self.cells.drop(sequence, start)
        return True

    def _window_lost(self, sequence: int, length: int) -> bool:
        """True where sliding-window layers no longer have the tokens that position `length` looks back at."""
        if not self._window:
            return False
        oldest: int = llama_cpp.llama_memory_seq_pos_min(self._handle, sequence)
        return oldest > max(0, length - self._window)


def _pointer(data: npt.NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
