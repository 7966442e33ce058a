"""Values that the engine takes and gives. Frozen, and without any behaviour beyond simple derivations."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Xtc:
    """Exclude top choices. Source: llama.cpp's XTC sampler."""

    probability: float = 0.0
    threshold: float = 0.1


@dataclass(frozen=True, slots=True)
class Dry:
    """Don't repeat yourself. `window` is in tokens, -1 the whole context. Source: llama.cpp's DRY sampler."""

    multiplier: float = 0.0
    base: float = 1.75
    allowed_length: int = 2
    window: int = -1
    sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition penalties over the last `window` tokens (-1: the whole context), prompt included."""

    window: int = 64
    repeat: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    @property
    def neutral(self) -> bool:
        return self.window == 0 or (self.repeat == 1.0 and self.frequency == 0.0 and self.presence == 0.0)


@dataclass(frozen=True, slots=True)
class Mirostat:
    """Mirostat 2.0: target surprise `tau` (bits) and learning rate `eta`."""

    tau: float = 5.0
    eta: float = 0.1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. The defaults are llama.cpp's."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc: Xtc = field(default_factory=Xtc)
    dry: Dry = field(default_factory=Dry)
    penalties: Penalties = field(default_factory=Penalties)
    mirostat: Mirostat | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    ignore_eos: bool = False
    grammar: str | None = None
    """GBNF text with a rule `root`; a JSON schema was turned into one before."""

    @property
    def greedy(self) -> bool:
        """True where the answer is the largest raw logit that is allowed, so that no sampler chain is needed."""
        return (
            self.temperature == 0.0
            and self.mirostat is None
            and self.penalties.neutral
            and self.dry.multiplier == 0.0
            and not self.logit_bias
            and self.grammar is None
        )


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """How much a request speculates. `n_max` is the most tokens of a draft (0: none at all, None: the server's limit);
    a draft of fewer than `n_min` tokens is not worth a round. A draft model stops before a token that it gives less
    than `p_min`.
    """

    n_max: int | None = None
    n_min: int = 0
    p_min: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, checked and tokenized. Times are seconds of `time.monotonic`."""

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None = None
    """0: only the prompt is processed."""
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """None: not wanted; n: the drawn token's and those of the n most likely ones."""
    slot_id: int | None = None
    session: str | None = None
    cache_key: str = ""
    reuse_prefix: bool = True
    draft: DraftOptions = field(default_factory=DraftOptions)
    progress: bool = False
    arrived: float = 0.0
    time_limit_at: float | None = None
    """Then the text ends with FinishReason.TIME_LIMIT."""
    deadline_at: float | None = None
    """Then the caller is gone, and nothing is sent any more."""


@dataclass(frozen=True, slots=True)
class Paused:
    """A generation between two tokens: what it takes to go on elsewhere to the same text.

    `generated` are the tokens drawn so far, of which the last one's state is not in the memory. `draws` is how often
    random numbers were taken.
    """

    request: Request
    generated: tuple[int, ...]
    draws: int = 0


@dataclass(frozen=True, slots=True)
class ContextCheckpoint:
    """The part of a memory that cannot go back, as it was after `length` tokens, as llama.cpp writes it (PARTIAL_ONLY),
    with its prefix of 8 bytes.
    """

    length: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class SlotContents:
    """What a slot holds. States are as llama.cpp writes them, with its prefix of 8 bytes; `draft` is that of the draft
    model, which may hold the first `draft_tokens` of the tokens only.
    """

    tokens: tuple[int, ...]
    target: memoryview
    draft: memoryview | None = None
    draft_tokens: int = 0
    session: str | None = None
    cache_key: str = ""
    paused: Paused | None = None
    checkpoints: tuple[ContextCheckpoint, ...] = ()


class FinishReason(enum.Enum):
    END_OF_TEXT = "end_of_text"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens."""

    prompt: int
    reused: int
    generated: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds: arrival to slot, slot to first token, first to last token."""

    queue: float
    prompt: float
    generation: float


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did for a request. All but the time are tokens, or rounds that verified a draft.

    `accepted_at[i]` counts the rounds that accepted their draft's token i; `replayed` are accepted tokens that were
    computed again after a checkpoint came back. `draft_seconds` is the request's share of the draft's time.
    """

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    accepted_at: tuple[int, ...] = ()
    replayed: int = 0
    draft_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log probability of the drawn token and of the most likely ones (token id, logprob), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    slot_id: int
    prompt_tokens: int
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    processed_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Complete UTF-8 text, and the tokens drawn since the last delta."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str = ""
    speculation: Speculation = field(default_factory=Speculation)


Event = Started | Progress | Delta | Finished
"""What a request's stream carries; exactly one `Finished` ends it, or an error takes its place."""


class SlotState(enum.Enum):
    IDLE = "idle"
    PROMPT = "prompt"
    GENERATING = "generating"


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """What a slot looks like between two steps. Counts are tokens; `last_used` is seconds since the epoch."""

    id: int
    state: SlotState
    cached_tokens: int
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    context_tokens: int
    session: str | None
    request_id: str | None
    last_used: float | None


@dataclass(frozen=True, slots=True)
class Load:
    """Counters since start and smoothed rates (tokens a second, rows a step, seconds a step).

    `busy_seconds` is the time of all steps since start, `decode_seconds` the part of it inside the runner's decode,
    `draft_seconds` the part for drafts. `decodes` are those of the target, `rounds` those of them that verified drafts,
    `flushes` those that computed nothing but accepted tokens again, `checkpoints` those taken of the target.

    What is shelved is in host memory for conversations that lost their slot; `fetched_tokens` of them came back since
    start.
    """

    slots: int = 0
    busy_slots: int = 0
    queued_requests: int = 0
    queue_limit: int = 0
    cached_tokens: int = 0
    context_tokens: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    prompt_rate: float = 0.0
    generation_rate: float = 0.0
    rows_per_step: float = 0.0
    step_seconds: float = 0.0
    busy_seconds: float = 0.0
    decode_seconds: float = 0.0
    decodes: int = 0
    rounds: int = 0
    flushes: int = 0
    checkpoints: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    replayed_tokens: int = 0
    draft_seconds: float = 0.0
    shelved_states: int = 0
    shelved_bytes: int = 0
    fetched_tokens: int = 0


class Rollback(enum.Enum):
    """How rejected tokens are dropped from the memory."""

    TRIM = "trim"
    """Attention: the end of a sequence is removed."""
    SNAPSHOTS = "snapshots"
    """Recurrent states of the last tokens are kept, and one of them comes back."""
    CHECKPOINT = "checkpoint"
    """One copy on the device from before the round comes back, and accepted tokens are computed again."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the memory of the model allows, found by trying at start."""

    trim: bool
    recurrent: bool
    hybrid: bool
    sliding_window: int
    rollback: Rollback
    context_checkpoints: bool = False
    """Copies of what cannot go back are kept while prompts are read."""
    deterministic: bool = False
    """Texts depend on their requests alone: it was asked for, and a test at start confirmed it."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded. Context sizes are tokens, sizes are bytes."""

    name: str
    description: str
    architecture: str
    parameters: int
    size_bytes: int
    vocabulary_size: int
    embedding_size: int
    layers: int
    trained_context: int
    context: int
    slot_context: int
    slots: int
    capabilities: Capabilities
    chat_template: str | None
