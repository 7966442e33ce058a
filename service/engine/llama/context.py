"""One llama.cpp context: a decode of many slots' rows at once, and the memory behind it."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import psutil

from service.engine.batch import DecodeStatus, Logits, Segment
from service.engine.llama import library
from service.engine.llama.bits import keeps_its_bits
from service.engine.llama.invariant import MICRO_BATCH, SPLIT_ATTENTION, InvariantDecoder
from service.engine.llama.memory import Memory
from service.engine.llama.model import Model
from service.engine.settings import ContextSettings, RollbackChoice
from service.engine.types import ContextCheckpoint, Rollback
from service.errors import ConfigError

log = logging.getLogger("slotwire.engine")

MAX_SLOTS = 255  # LLAMA_MAX_SEQ, less the scratch sequence
DEFAULT_CONTEXT = 8192  # tokens; the most that a context of size 0 takes from the model

_FLASH = {"auto": -1, "off": 0, "on": 1}
_ROPE = {"model": -1, "none": 0, "linear": 1, "yarn": 2, "longrope": 3}
_GGML_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a context is prepared for: `rows` drafted tokens of a slot in a decode, dropped again by `rollback`.

    `snapshot_bytes` is what recurrent snapshots may take before `auto` does without them.
    """

    rows: int = 0
    rollback: RollbackChoice = "auto"
    snapshot_bytes: int = 0


class Context:
    """The context of a target or of a draft model. Sequence i belongs to slot i, one more is scratch.

    All sequences share one unified cache of `size` tokens. Not thread-safe: the engine's thread owns it.
    Source: `llama_init_from_model` and `llama_decode` of llama.h.
    """

    def __init__(self, model: Model, settings: ContextSettings, drafting: Drafting = Drafting()) -> None:
        if not 1 <= settings.slots <= MAX_SLOTS:
            raise ConfigError(f"slots: {settings.slots} is not in [1, {MAX_SLOTS}]")
        self.scratch = settings.slots
        self.handle: Any = None
        self.size = self.max_rows = self.max_outputs = 0
        self.micro_batch = 0
        self._invariant: InvariantDecoder | None = None
        self._attends = not llama_cpp.llama_model_is_recurrent(model.handle)
        self.recurrent = not self._attends or bool(llama_cpp.llama_model_is_hybrid(model.handle))
        self.vocabulary: int = llama_cpp.llama_vocab_n_tokens(model.vocab_handle)
        self._logits: Logits = np.empty((0, self.vocabulary), np.float32)
        try:
            self._open_best(model, settings, drafting)
            self.deterministic = self._promises(model, settings)
        except BaseException:
            self.close()
            raise

    def _open_best(self, model: Model, settings: ContextSettings, drafting: Drafting) -> None:
        """With snapshots, where they are wanted, there are any, and they are not too large; else without."""
        wanted = drafting.rows if self.recurrent and drafting.rollback in ("auto", "snapshots") else 0
        if settings.deterministic:  # decodes in parts, between which snapshots are lost
            wanted = 0
        self._open(model, settings, drafting, snapshots=wanted)
        snapshots = self._snapshots
        if snapshots and drafting.rollback == "auto" and snapshots * self._state_bytes > drafting.snapshot_bytes:
            log.info("no snapshots: they would take %d MiB", snapshots * self._state_bytes >> 20)
            self.close()
            self._open(model, settings, drafting, snapshots=0)
        if drafting.rollback not in ("auto", self.rollback.value):
            raise ConfigError(
                f"rollback: {drafting.rollback} does not work with this model's memory, {self.rollback.value} does",
                reason="ROLLBACK_UNUSABLE",
            )

    def _promises(self, model: Model, settings: ContextSettings) -> bool:
        """Whether every row keeps its bits; finds out whether a single row does so without company.

        What left the window of one sequence is taken for another one, at places that nobody can tell. And a test of a
        few tokens does not speak for the kernels of a GPU.
        """
        if self._invariant is None or (self._window and settings.slots > 1) or model.on_gpu:
            return False
        types = {settings.cache_type_k, settings.cache_type_v}
        split = self._attends and types in ({"f16"}, {"f32"}, {"f16", "f32"})  # f32 is made f16 for attention
        self._invariant.single_up_to = SPLIT_ATTENTION if split else math.inf
        if keeps_its_bits(self):
            return True
        self._invariant.single_up_to = 0
        return keeps_its_bits(self)

    def _open(self, model: Model, settings: ContextSettings, drafting: Drafting, snapshots: int) -> None:
        library.clear_complaints()
        params = _params(model, settings, drafting.rows, snapshots)
        self.handle = llama_cpp.llama_init_from_model(model.handle, params)
        if not self.handle:
            why = library.last_complaint("llama.cpp gave no reason")
            raise ConfigError(f"context: cannot be made: {why}", reason="CONTEXT_UNUSABLE")
        # with `swa_full`, too, cells outside the window are taken where they are in the way
        self._window: int = llama_cpp.llama_model_n_swa(model.handle)
        self.size = llama_cpp.llama_n_ctx(self.handle)
        self.max_rows = self._max_rows(settings.slots)
        self.max_outputs = params.n_outputs_max
        self.batch = Batch(self.max_rows)
        self.micro_batch = llama_cpp.llama_n_ubatch(self.handle)
        model.apply_adapters(self.handle)
        self._snapshots: int = llama_cpp.llama_n_rs_seq(self.handle)
        self.memory = Memory(self.handle, Rollback.TRIM)
        self.rollback, self._state_bytes = self._probe(settings.slots)
        self.memory = Memory(
            self.handle,
            self.rollback,
            window=self._window,
            snapshots=self._snapshots,
            most_copies=settings.context_checkpoints,
            copied_bytes=settings.checkpoint_bytes,
        )
        if settings.deterministic:
            self._invariant = InvariantDecoder(
                self,
                self.memory,
                self.scratch,
                self.micro_batch,
                recurrent=self.recurrent,
                size=self.size if self._attends else 0,
            )

    def decode(self, segments: Sequence[Segment]) -> DecodeStatus:
        """Compute the rows of all segments; in one `llama_decode`, unless every row is to keep its bits."""
        if self._invariant is None:
            return self.decode_rows(segments)
        status = self._invariant.decode(segments)
        self._logits = self._invariant.logits
        return status

    def decode_rows(self, segments: Sequence[Segment]) -> DecodeStatus:
        outputs = self.batch.fill(segments, self.max_outputs)
        status: int = llama_cpp.llama_decode(self.handle, self.batch.struct)
        if status == 1:
            return DecodeStatus.NO_ROOM
        if status != 0:
            log.error("decode failed: status %d, %d rows: %s", status, self.batch.rows, library.last_complaint("?"))
            return DecodeStatus.FAILED
        self.memory.decoded(segments)
        if outputs:
            address = ctypes.cast(llama_cpp.llama_get_logits(self.handle), ctypes.c_void_p).value
            self._view_logits(address, outputs)
        return DecodeStatus.OK

    def output_rows(self, count: int) -> Logits:
        return self._logits[:count]

    def logits(self, index: int) -> Logits:
        """Of the index-th output row of the last decode, shape [vocabulary]; valid until the next one."""
        row: Logits = self._logits[index]
        return row

    def checkpoint(self, slot: int) -> bool:
        return self.memory.checkpoint(slot)

    def keep(self, slot: int, length: int) -> int:
        return self.memory.keep(slot, length)

    def add_context_checkpoint(self, slot: int) -> bool:
        return self.memory.add_context_checkpoint(slot)

    def context_checkpoints(self, slot: int) -> tuple[ContextCheckpoint, ...]:
        return self.memory.context_checkpoints(slot)

    def put_context_checkpoints(self, slot: int, checkpoints: Sequence[ContextCheckpoint]) -> None:
        self.memory.put_context_checkpoints(slot, checkpoints)

    def state_size(self, slot: int) -> int:
        return self.memory.state_size(slot)

    def state(self, slot: int, room: memoryview | None = None) -> memoryview:
        return self.memory.state(slot, room)

    def put_back(self, slot: int, state: memoryview, length: int) -> bool:
        return self.memory.put_back(slot, state, length)

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
            floats = (ctypes.c_float * (rows * self.vocabulary)).from_address(address or 0)
            self._logits = np.ctypeslib.as_array(floats).reshape(rows, self.vocabulary)

    def _probe(self, slots: int) -> tuple[Rollback, int]:
        """Warm the library up and find out by doing it whether the end of a sequence can be dropped, and how many bytes
        the states of all sequences take that cannot be dropped.
        """
        tokens = [0, 0]
        for start in range(len(tokens)):  # one row each, as when generating
            if self.decode([Segment(self.scratch, tokens[:1], start, outputs=1)]) is not DecodeStatus.OK:
                raise ConfigError("context: the first decode failed: " + library.last_complaint("no reason given"))
        handle = llama_cpp.llama_get_memory(self.handle)
        size: int = llama_cpp.llama_state_seq_get_size_ext(
            self.handle, self.scratch, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        )
        trimmed = bool(llama_cpp.llama_memory_seq_rm(handle, self.scratch, 1, -1))
        self.memory.clear(self.scratch)
        if self.recurrent and self._snapshots:
            return Rollback.SNAPSHOTS, size * (slots + 1)
        return Rollback.TRIM if trimmed else Rollback.CHECKPOINT, size * (slots + 1)


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

    def fill(self, segments: Sequence[Segment], max_outputs: int) -> int:
        """Write the rows of `segments`; returns how many of them have an output.

        Raises ValueError where rows or outputs are more than there is room for, which would abort the process.
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
            if segment.outputs:
                self._outputs[end - segment.outputs : end] = 1
                outputs += segment.outputs
            row = end
        if outputs > max_outputs:
            raise ValueError(f"{outputs} outputs; at most {max_outputs}")
        self.rows = self.struct.n_tokens = total
        return outputs


def _params(model: Model, settings: ContextSettings, draft_rows: int, snapshots: int) -> Any:
    """`llama_context_params` for the settings."""
    trained: int = llama_cpp.llama_model_n_ctx_train(model.handle)
    threads = settings.threads or psutil.cpu_count(logical=False) or 1
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = settings.context or min(trained, DEFAULT_CONTEXT)
    params.n_batch = settings.batch
    params.n_ubatch = min(settings.ubatch, settings.batch)
    if settings.deterministic:
        params.n_ubatch = min(params.n_ubatch, MICRO_BATCH)
        params.n_batch -= params.n_batch % params.n_ubatch  # so that there always is room for the row that is added
    params.n_seq_max = settings.slots + 1
    # More outputs than this would abort; room for them is only taken when they come.
    params.n_outputs_max = max(settings.slots + 1, min(settings.slots * (1 + draft_rows), params.n_batch))
    params.n_rs_seq = min(snapshots, params.n_ubatch - 2)  # as many and one more abort in llama_batch_allocr
    params.n_threads = threads
    params.n_threads_batch = settings.threads_batch or threads
    params.flash_attn_type = _FLASH[settings.flash_attention]
    params.type_k = _GGML_TYPES[settings.cache_type_k]
    params.type_v = _GGML_TYPES[settings.cache_type_v]
    params.offload_kqv = settings.kv_offload
    params.swa_full = settings.swa_full or settings.deterministic  # or the cells of a window are taken by others
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
