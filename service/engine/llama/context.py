"""One llama.cpp context: a decode of many slots' rows at once, and the memory behind it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import psutil

from service.engine.batch import DecodeStatus, Logits, Segment
from service.engine.llama import library
from service.engine.llama.model import Model
from service.engine.settings import ContextSettings
from service.errors import ConfigError

log = logging.getLogger("slotwire.engine")

MAX_SLOTS = 255  # LLAMA_MAX_SEQ, less the scratch sequence
DEFAULT_CONTEXT = 8192  # tokens; the most that a context of size 0 takes from the model

_FLASH = {"auto": -1, "off": 0, "on": 1}
_ROPE = {"model": -1, "none": 0, "linear": 1, "yarn": 2, "longrope": 3}
_GGML_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip


class Context:
    """The target context. Sequence i belongs to slot i, one more is scratch.

    All sequences share one unified cache of `size` tokens. Not thread-safe: the engine's thread owns it.
    Source: `llama_init_from_model`, `llama_decode` and `llama_memory_*` of llama.h.
    """

    def __init__(self, model: Model, settings: ContextSettings) -> None:
        if not 1 <= settings.slots <= MAX_SLOTS:
            raise ConfigError(f"slots: {settings.slots} is not in [1, {MAX_SLOTS}]")
        self.scratch = settings.slots
        library.clear_complaints()
        self.handle = llama_cpp.llama_init_from_model(model.handle, _params(model, settings))
        if not self.handle:
            why = library.last_complaint("llama.cpp gave no reason")
            raise ConfigError(f"context: cannot be made: {why}", reason="CONTEXT_UNUSABLE")
        try:
            self._set_up(model, settings)
        except BaseException:
            self.close()
            raise

    def _set_up(self, model: Model, settings: ContextSettings) -> None:
        self._memory = llama_cpp.llama_get_memory(self.handle)
        self._vocabulary: int = llama_cpp.llama_vocab_n_tokens(model.vocab_handle)
        self._window: int = 0 if settings.swa_full else llama_cpp.llama_model_n_swa(model.handle)
        self.size: int = llama_cpp.llama_n_ctx(self.handle)
        self.max_rows = self._max_rows(settings.slots)
        self.batch = Batch(self.max_rows)
        self._logits: Logits = np.empty((0, self._vocabulary), np.float32)
        model.apply_adapters(self.handle)
        self.can_trim = self._probe()

    def decode(self, segments: Sequence[Segment]) -> DecodeStatus:
        """Compute the rows of all segments in one `llama_decode`."""
        outputs = self.batch.fill(segments)
        status: int = llama_cpp.llama_decode(self.handle, self.batch.struct)
        if status == 1:
            return DecodeStatus.NO_ROOM
        if status != 0:
            log.error("decode failed: status %d, %d rows: %s", status, self.batch.rows, library.last_complaint("?"))
            return DecodeStatus.FAILED
        if outputs:
            address = ctypes.cast(llama_cpp.llama_get_logits(self.handle), ctypes.c_void_p).value
            self._view_logits(address, outputs)
        return DecodeStatus.OK

    def logits(self, index: int) -> Logits:
        """Of the index-th output row of the last decode, shape [vocabulary]; a view into the library's buffer."""
        row: Logits = self._logits[index]
        return row

    def keep(self, sequence: int, length: int) -> int:
        """Drop the tokens of `sequence` from position `length` on; returns `length`, or 0 if it had to be emptied."""
        if length and self._window_lost(sequence, length):
            length = 0
        if llama_cpp.llama_memory_seq_rm(self._memory, sequence, length or -1, -1):
            return length
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)  # a whole sequence can always go
        return 0

    def close(self) -> None:
        if self.handle:
            llama_cpp.llama_free(self.handle)
            self.handle = None

    def _max_rows(self, slots: int) -> int:
        """The most rows of one decode. With a sliding window they must fit one micro-batch: preparing a second one,
        `llama_kv_cache::prepare` gives the cells away that the first one still looks back at (seen in this version:
        wrong logits, no error).
        """
        name, rows = "batch", int(llama_cpp.llama_n_batch(self.handle))
        if self._window:
            name, rows = "ubatch", int(llama_cpp.llama_n_ubatch(self.handle))
        if rows <= slots:
            raise ConfigError(f"{name}: {rows} rows leave none for a prompt beside {slots} slots")
        return rows

    def _view_logits(self, address: int | None, rows: int) -> None:
        """Point `_logits` at the library's buffer; a new view only when it moved or has too few rows."""
        if self._logits.shape[0] < rows or self._logits.ctypes.data != address:
            floats = (ctypes.c_float * (rows * self._vocabulary)).from_address(address or 0)
            self._logits = np.ctypeslib.as_array(floats).reshape(rows, self._vocabulary)

    def _window_lost(self, sequence: int, length: int) -> bool:
        """True where sliding-window layers no longer have the tokens that position `length` looks back at."""
        if not self._window:
            return False
        oldest: int = llama_cpp.llama_memory_seq_pos_min(self._memory, sequence)
        return oldest > max(0, length - self._window)

    def _probe(self) -> bool:
        """Warm the library up and find out whether the end of a sequence can be dropped, by doing it."""
        tokens = [0, 0]
        for start in range(len(tokens)):  # one row each, as when generating
            if self.decode([Segment(self.scratch, tokens[:1], start, output=True)]) is not DecodeStatus.OK:
                raise ConfigError("context: the first decode failed: " + library.last_complaint("no reason given"))
        trimmed = bool(llama_cpp.llama_memory_seq_rm(self._memory, self.scratch, 1, -1))
        llama_cpp.llama_memory_seq_rm(self._memory, self.scratch, -1, -1)
        return trimmed


class Batch:
    """A `llama_batch` whose arrays are numpy's, so that rows are written by slices."""

    def __init__(self, rows: int) -> None:
        self.rows = 0
        self.tokens = np.zeros(rows, np.int32)
        self.positions = np.zeros(rows, np.int32)
        self._sequence_counts = np.ones(rows, np.int32)
        self._sequences = np.zeros(rows, np.int32)
        self._outputs = np.zeros(rows, np.int8)
        # the library wants a pointer to the list of sequences of each row; each list has one entry
        width = self._sequences.itemsize
        self._sequence_lists = (self._sequences.ctypes.data + width * np.arange(rows)).astype(np.uintp)
        self._ramp = np.arange(rows, dtype=np.int32)
        fields = llama_cpp.llama_batch
        self.struct = fields(
            n_tokens=0,
            token=self.tokens.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            embd=None,
            pos=self.positions.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            n_seq_id=self._sequence_counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._sequence_lists.ctypes.data_as(
                ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))
            ),
            logits=self._outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )  # fmt: skip

    def fill(self, segments: Sequence[Segment]) -> int:
        """Write the rows of `segments`; returns how many of them have an output.

        Raises ValueError where they are more than there is room for, which would abort the process.
        """
        total = sum(len(segment.tokens) for segment in segments)
        if not 0 < total <= len(self.tokens):
            raise ValueError(f"{total} rows; a batch has 1 to {len(self.tokens)}")
        row = outputs = 0
        self._outputs[:total] = 0
        for segment in segments:
            count = len(segment.tokens)
            end = row + count
            if count == 1:  # a generating slot: plain stores are cheaper than slices
                self.tokens[row] = segment.tokens[0]
                self.positions[row] = segment.start
                self._sequences[row] = segment.slot
            else:
                self.tokens[row:end] = segment.tokens
                np.add(self._ramp[:count], segment.start, out=self.positions[row:end])
                self._sequences[row:end] = segment.slot
            if segment.output:
                self._outputs[end - 1] = 1
                outputs += 1
            row = end
        self.rows = self.struct.n_tokens = total
        return outputs


def _params(model: Model, settings: ContextSettings) -> Any:
    """`llama_context_params` for the settings."""
    trained: int = llama_cpp.llama_model_n_ctx_train(model.handle)
    threads = settings.threads or psutil.cpu_count(logical=False) or 1
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = settings.context or min(trained, DEFAULT_CONTEXT)
    params.n_batch = settings.batch
    params.n_ubatch = min(settings.ubatch, settings.batch)
    params.n_seq_max = settings.slots + 1
    params.n_outputs_max = settings.slots + 1  # logits of one row a slot; more would abort, and room costs memory
    params.n_threads = threads
    params.n_threads_batch = settings.threads_batch or threads
    params.flash_attn_type = _FLASH[settings.flash_attention]
    params.type_k = _GGML_TYPES[settings.cache_type_k]
    params.type_v = _GGML_TYPES[settings.cache_type_v]
    params.offload_kqv = settings.kv_offload
    params.swa_full = settings.swa_full
    params.kv_unified = True
    params.rope_scaling_type = _ROPE[settings.rope_scaling]
    params.rope_freq_base = settings.rope_freq_base
    params.rope_freq_scale = settings.rope_freq_scale
    params.yarn_ext_factor = settings.yarn_ext_factor
    params.yarn_attn_factor = settings.yarn_attn_factor
    params.yarn_beta_fast = settings.yarn_beta_fast
    params.yarn_beta_slow = settings.yarn_beta_slow
    params.yarn_orig_ctx = settings.yarn_orig_ctx
    params.no_perf = True
    return params
