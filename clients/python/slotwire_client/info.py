"""Values that describe a server: its state, its model and its load."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime

from slotwire_client.types import GenerateOptions


class ServerState(enum.Enum):
    """What a server does. UNKNOWN: a state of a newer server."""

    UNKNOWN = "unknown"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server. `load_progress` is that of the model, in [0, 1]; `runtime_version` is llama-cpp-python's."""

    version: str
    runtime_version: str
    system_info: str
    state: ServerState
    load_progress: float
    started_at: datetime | None


class Rollback(enum.Enum):
    """How rejected drafts are dropped from the model's memory. UNKNOWN: in a way of a newer server."""

    UNKNOWN = "unknown"
    TRIM = "trim"
    SNAPSHOTS = "snapshots"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the model's memory allows. `sliding_window` is in tokens; 0 where there is none. With `deterministic` a text
    depends on its request alone, bit for bit.
    """

    trim: bool
    recurrent: bool
    hybrid: bool
    sliding_window: int
    chat: bool
    rollback: Rollback = Rollback.UNKNOWN
    deterministic: bool = False
    draft_ngram: bool = False
    draft_model: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model. `size_bytes` is that of all weights; contexts are tokens."""

    name: str
    description: str
    architecture: str
    parameters: int
    size_bytes: int
    vocabulary_size: int
    embedding_size: int
    layers: int
    trained_context_tokens: int
    context_tokens: int
    slot_context_tokens: int
    slots: int
    capabilities: Capabilities
    chat_template: str
    sampling_defaults: GenerateOptions
    """What a left-out sampling option means."""


@dataclass(frozen=True, slots=True)
class Load:
    """Counters since start and smoothed rates. `step_seconds` is one step's time, `rows_per_step` its batch."""

    slots: int
    busy_slots: int
    queued_requests: int
    queue_limit: int
    cached_tokens: int
    context_tokens: int
    requests: int
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    steps: int
    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    rows_per_step: float
    step_seconds: float
    memory_bytes: int
    busy_seconds: float
    """Time of all steps since start."""
    decode_seconds: float
    """The part of it inside llama.cpp's decode."""
    decodes: int = 0
    """Of the target, since start; `rounds` of them verified drafts, `flushes` computed accepted tokens again."""
    rounds: int = 0
    flushes: int = 0
    checkpoints: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    replayed_tokens: int = 0
    draft_seconds: float = 0.0
    shelved_states: int = 0
    """Conversations that lost their slot and are kept in host memory; `fetched_tokens` came back since start."""
    shelved_bytes: int = 0
    fetched_tokens: int = 0
