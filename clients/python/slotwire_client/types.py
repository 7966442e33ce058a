"""Values that the client takes and gives. Counts are tokens and times are seconds unless a name says otherwise."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; `role` as the model's template knows it: `system`, `user`, `assistant`, `tool`."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids that are used as they are, or a conversation for the template that the model carries."""


@dataclass(frozen=True, slots=True)
class Xtc:
    """Exclude top choices: with `probability`, drop all tokens above `threshold` but the least likely of them."""

    probability: float | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Dry:
    """Punish tokens that would prolong a sequence that was there. `window` is in tokens, -1 the whole context."""

    multiplier: float | None = None
    base: float | None = None
    allowed_length: int | None = None
    window: int | None = None
    sequence_breakers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Penalties:
    """Punish tokens that occurred in the last `window` tokens; -1 is the whole context."""

    window: int | None = None
    repeat: float | None = None
    frequency: float | None = None
    presence: float | None = None


@dataclass(frozen=True, slots=True)
class Mirostat:
    """Mirostat 2.0 in place of the filters: target surprise `tau` and learning rate `eta`."""

    tau: float | None = None
    eta: float | None = None


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How much a request speculates, which changes its speed and never its text. `enabled` False: not at all; `n_max`
    and `n_min` bound the tokens of a draft; a draft model stops before a token that it gives less than `p_min`.
    """

    enabled: bool | None = None
    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None


class GenerateOptions(TypedDict, total=False):
    """What a generation can be told besides its prompt. Left out, or None: the server's default.

    How tokens are drawn:
        temperature, top_k, top_p, min_p, typical_p, top_n_sigma: as in llama.cpp; temperature 0 is greedy.
        xtc, dry, penalties, mirostat: further stages.
        logit_bias: added to the logit of a token id; `-inf` forbids it.
        seed: fixes the draws. Left out: a new one each time, named in `Started`.
        ignore_eos: never end the text by itself.
        grammar: GBNF with a rule `root` that the text must follow.
        json_schema: a JSON schema that the text must follow, as JSON text or as the object itself.

    How far it goes and what it tells:
        max_tokens: the most tokens to generate.
        stop: the text ends before the first of these.
        time_limit: seconds from the arrival of the request; then the text ends with what there is.
        timeout: seconds until the call fails with DeadlineExceeded.
        logprobs: report the log probability of each token, and of this many likely ones.
        progress: report how much of the prompt was processed.
        timings: report the times in the result.
        speculation: whether and how much is drafted.

    Where it runs:
        slot_id: the slot to use.
        session: requests of one session stay on one slot while it is theirs.
        cache_key: prefixes are reused only among requests with equal keys.
        reuse_prefix: False computes the whole prompt again.

    How the prompt is read:
        add_special: (text) False leaves out the tokens that the model wants in front.
        parse_special: (text, conversation) True recognises control tokens written as text.
        add_generation_prompt: (conversation) False leaves out the opening of the assistant's message.
        template_arguments: (conversation) further variables of the template.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    top_n_sigma: float | None
    xtc: Xtc | None
    dry: Dry | None
    penalties: Penalties | None
    mirostat: Mirostat | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    ignore_eos: bool | None
    grammar: str | None
    json_schema: str | Mapping[str, object] | bool | None
    max_tokens: int | None
    stop: Sequence[str]
    time_limit: float | None
    timeout: float | None
    logprobs: int | None
    progress: bool | None
    timings: bool | None
    speculation: SpeculationOptions | None
    slot_id: int | None
    session: str | None
    cache_key: str | None
    reuse_prefix: bool | None
    add_special: bool | None
    parse_special: bool | None
    add_generation_prompt: bool | None
    template_arguments: Mapping[str, object] | None


class FinishReason(enum.Enum):
    """Why the text ended. UNKNOWN: a reason of a newer server."""

    UNKNOWN = "unknown"
    END_OF_TEXT = "end_of_text"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, those of them whose state was still there, and the tokens generated."""

    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from arrival to a slot, from there to the first token, and from the first token to the last."""

    queue: float
    prompt: float
    generation: float


@dataclass(frozen=True, slots=True)
class Speculation:
    """What drafts did for a request. `rounds` are decodes that verified one, `accepted_per_position[i]` those of them
    that accepted token i; `replayed_tokens` were accepted and computed again. `draft_seconds` went into drafts.
    """

    drafted_tokens: int
    accepted_tokens: int
    rounds: int
    accepted_per_position: tuple[int, ...]
    replayed_tokens: int
    draft_seconds: float


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """Natural log probability of a token, and the token's bytes, which need not be complete UTF-8."""

    token_id: int
    logprob: float
    piece: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The token that was drawn, and the most likely ones, best first."""

    token: LogprobEntry
    top: tuple[LogprobEntry, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """The request has a slot."""

    request_id: str
    slot_id: int
    prompt_tokens: int
    reused_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the prompt the model has seen, reused tokens included."""

    processed_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, and the tokens drawn since the last delta. The text may be empty."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The text ended. `stop` is the stop string that was met, if one was; `timings` is there where asked for,
    `speculation` where anything was drafted.
    """

    reason: FinishReason
    stop: str
    usage: Usage
    timings: Timings | None
    speculation: Speculation | None = None


Event = Started | Progress | Delta | Finished
"""What `Generation.events` gives: one Started, any number of Progress and Delta, one Finished."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """All that a finished generation gave."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason
    stop: str
    usage: Usage
    timings: Timings | None
    request_id: str
    slot_id: int
    seed: int
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A token's id and its bytes, which need not be complete UTF-8."""

    id: int
    piece: bytes


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model sees it."""

    text: str
    token_ids: tuple[int, ...]


class SlotState(enum.Enum):
    """What a slot does. UNKNOWN: a state of a newer server."""

    UNKNOWN = "unknown"
    IDLE = "idle"
    PROMPT = "prompt"
    GENERATING = "generating"


@dataclass(frozen=True, slots=True)
class Slot:
    """One seat of the engine. `cached_tokens` is what it remembers, `context_tokens` the most that it can."""

    id: int
    state: SlotState
    cached_tokens: int
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    context_tokens: int
    session: str | None
    request_id: str | None
    last_used: datetime | None
