"""What an operator may set about the model, its context and the engine.

Plain values with defaults; `service/config.py` fills them from the command line, the environment and a file, and
shows the docstrings below as help.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]

Grammars = Literal["all", "schemas", "none"]
RollbackChoice = Literal["auto", "trim", "snapshots", "checkpoint"]
DraftSource = Literal["auto", "none", "ngram", "model", "both"]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which weights, and where they go.

    Attributes:
        model: GGUF file of the target. Left out: the embedded default model (extra `demo`).
        gpu_layers: Layers on the GPU; -1 is all of them.
        split_mode: How several GPUs share the model.
        main_gpu: The GPU that holds everything with split mode `none`.
        tensor_split: Share of each GPU, e.g. `--tensor-split 3 --tensor-split 1`.
        mmap: Map the file into memory instead of reading it.
        mlock: Keep the weights from being swapped out.
        check_tensors: Look for invalid values in the weights while loading.
        override_kv: Change a metadata value, as KEY=TYPE:VALUE with TYPE int, float, bool or str.
        lora: LoRA adapter to apply, as FILE or FILE:SCALE.
    """

    model: Path | None = None
    gpu_layers: int = -1
    split_mode: Literal["none", "layer", "row", "tensor"] = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    mmap: bool = True
    mlock: bool = False
    check_tensors: bool = False
    override_kv: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """The memory of the slots, and how it is computed.

    Attributes:
        slots: Conversations that generate at the same time.
        context: Tokens that all slots hold together. 0: what the model was trained with, 8,192 at most.
        slot_context: The most tokens of one slot. 0: the context, or what the model was trained with if that is less.
        batch: The most rows of one decode; more than the slots.
        ubatch: Rows of a decode that are computed at once.
        threads: Threads for generating. 0: the physical cores.
        threads_batch: Threads for prompts. 0: the same.
        flash_attention: Use flash attention.
        cache_type_k: Type of the cached keys.
        cache_type_v: Type of the cached values; a quantized one needs flash attention.
        kv_offload: Keep the cache on the GPU.
        swa_full: Keep the whole context of sliding-window layers, not just the window.
        rope_scaling: How positions beyond the trained context are scaled.
        rope_freq_base: Base frequency of RoPE. 0: the model's.
        rope_freq_scale: Scale of the RoPE frequency. 0: the model's.
        yarn_ext_factor: YaRN extrapolation mix; negative: the model's.
        yarn_attn_factor: YaRN magnitude scale; negative: the model's.
        yarn_beta_fast: YaRN low correction dimension; negative: the model's.
        yarn_beta_slow: YaRN high correction dimension; negative: the model's.
        yarn_orig_ctx: The context that the model was trained with, for YaRN. 0: the model's.
        context_checkpoints: Copies of what cannot go back (recurrent states, sliding windows) that a slot keeps in host
            memory while prompts are processed, so that a prompt that goes another way need not begin anew. 0: none.
        checkpoint_bytes: Bytes of all of them together, for each slot.
        deterministic: Let a text depend on its request alone, bit for bit, in micro-batches of at most 32 rows.
    """

    slots: int = 4
    context: int = 0
    slot_context: int = 0
    batch: int = 512
    ubatch: int = 512
    threads: int = 0
    threads_batch: int = 0
    flash_attention: Literal["auto", "on", "off"] = "auto"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    kv_offload: bool = True
    swa_full: bool = False
    rope_scaling: Literal["model", "none", "linear", "yarn", "longrope"] = "model"
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_orig_ctx: int = 0
    context_checkpoints: int = 8
    checkpoint_bytes: int = 512 << 20
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    """How the engine shares its time.

    Attributes:
        queue: Requests that may wait for a slot; one more is refused.
        pace: While others generate, a prompt's chunk may prolong a step to this many times its length without it.
        outbox_tokens: Tokens that may wait for a client that reads slowly before it is cut off.
        outbox_seconds: Seconds that a client may leave its tokens unread before it is cut off.
        grammars: Grammars that clients may send. One written to be ambiguous can stall everyone; `schemas` are safe.
        cache_memory: Bytes of host memory for conversations that lost their slot, so that they can come back. 0: none.
    """

    queue: int = 256
    pace: float = 2.5
    outbox_tokens: int = 8192
    outbox_seconds: float = 30.0
    grammars: Grammars = "all"
    cache_memory: int = 1 << 30


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Whether tokens are drafted, and how rejected ones are dropped from the memory.

    Attributes:
        draft: Where drafts come from. `auto`: from both with a draft model, from nowhere without one.
        draft_model: GGUF file of the draft model, which has the target's vocabulary.
        draft_max: The most tokens of a draft; how many are drafted is decided by what is measured.
        draft_context: Tokens that all slots hold together in the draft's context. 0: as many as in the target's.
        draft_gpu_layers: Layers of the draft on the GPU; -1 is all of them.
        draft_cache_type_k: Type of the draft's cached keys.
        draft_cache_type_v: Type of the draft's cached values; a quantized one needs flash attention.
        rollback: How rejected tokens are dropped from the target's memory; `auto` takes the best that works.
        snapshot_memory: Bytes that recurrent snapshots may take before `auto` takes checkpoints instead.
    """

    draft: DraftSource = "auto"
    draft_model: Path | None = None
    draft_max: int = 16
    draft_context: int = 0
    draft_gpu_layers: int = -1
    draft_cache_type_k: CacheType = "f16"
    draft_cache_type_v: CacheType = "f16"
    rollback: RollbackChoice = "auto"
    snapshot_memory: int = 512 << 20

    @property
    def ngram(self) -> bool:
        """Whether drafts are looked up in the slot's own text."""
        return self.draft in ("ngram", "both") or (self.draft == "auto" and self.draft_model is not None)

    @property
    def model(self) -> Path | None:
        """The draft model that is in use."""
        return self.draft_model if self.draft in ("auto", "model", "both") else None

    @property
    def rows(self) -> int:
        """Rows of a slot that a step may verify beside its newest token."""
        return self.draft_max if self.ngram or self.model else 0
