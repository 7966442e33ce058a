"""Requests and events: protobuf to domain values and back. Everything a caller can get wrong is refused here."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.timestamp_pb2 import Timestamp

from service.engine.chat import Message
from service.engine.intake import ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from service.engine.types import (
    Delta,
    DraftOptions,
    Event,
    Finished,
    FinishReason,
    Progress,
    Request,
    SlotInfo,
    SlotState,
    Speculation,
    Started,
    TokenLogprob,
)
from service.errors import FieldViolation, InvalidRequest
from service.rpc import sampling
from service.rpc.fields import Fields
from slotwire.v1 import generation_pb2 as pb
from slotwire.v1 import slot_pb2

MAX_STOPS, MAX_STOP_BYTES = 64, 1024
MAX_LOGPROBS = 64
MAX_LABEL_BYTES = 256  # of a session and of a cache key
MAX_MESSAGES = 10_000
_UINT32_MAX = 2**32 - 1

_REASONS = {
    FinishReason.END_OF_TEXT: pb.FINISH_REASON_END_OF_TEXT,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_FULL: pb.FINISH_REASON_CONTEXT_FULL,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
}
_STATES = {
    SlotState.IDLE: slot_pb2.SLOT_STATE_IDLE,
    SlotState.PROMPT: slot_pb2.SLOT_STATE_PROMPT,
    SlotState.GENERATING: slot_pb2.SLOT_STATE_GENERATING,
}


def read_generate(message: pb.GenerateRequest, request_id: str, now: float, deadline: float | None) -> Draft:
    """The draft of a request. `now` and `deadline` are seconds of `time.monotonic`. Raises InvalidRequest."""
    fields = Fields()
    prompt = _read_prompt(message.prompt, fields) if message.HasField("prompt") else None
    if prompt is None:
        fields.refuse("prompt", "give exactly one of text, tokens and chat")
    grammar = message.sampling.grammar
    if grammar.HasField("gbnf") and grammar.HasField("json_schema"):
        fields.refuse("sampling.grammar", "give one of gbnf and json_schema")
    limit = _read_seconds(message, fields)
    request = Request(
        id=request_id,
        tokens=(),
        sampling=sampling.read(message.sampling, fields, secrets.randbelow(sampling.MAX_SEED)),
        max_tokens=fields.integer(message, "max_tokens", 0, 0, _UINT32_MAX) if message.HasField("max_tokens") else None,
        stop=fields.strings(message.stop, "stop", MAX_STOPS, MAX_STOP_BYTES),
        logprobs=fields.integer(message, "logprobs", -1, 0, MAX_LOGPROBS) if message.HasField("logprobs") else None,
        slot_id=message.slot_id if message.HasField("slot_id") else None,
        session=fields.label(message, "session", MAX_LABEL_BYTES),
        cache_key=fields.label(message, "cache_key", MAX_LABEL_BYTES) or "",
        reuse_prefix=message.reuse_prefix if message.HasField("reuse_prefix") else True,
        draft=_read_speculation(message.speculation, fields),
        progress=message.progress,
        arrived=now,
        time_limit_at=None if limit is None else now + limit,
        deadline_at=deadline,
    )
    fields.check()
    return Draft(
        request,
        cast("Prompt", prompt),
        gbnf=grammar.gbnf if grammar.HasField("gbnf") else None,
        json_schema=grammar.json_schema if grammar.HasField("json_schema") else None,
    )


def whole(draft: Draft) -> Request:
    """The request of a draft whose prompt are tokens and whose grammar is GBNF, as the engine takes it."""
    assert isinstance(draft.prompt, TokenPrompt)
    sampling_ = replace(draft.request.sampling, grammar=draft.gbnf)
    return replace(draft.request, tokens=draft.prompt.ids, sampling=sampling_)


def read_resume(message: pb.GenerateRequest, request_id: str, now: float, deadline: float | None) -> Request:
    """What may be said of a generation that goes on: who it is, where, and for how long. Raises InvalidRequest."""
    fields = Fields()
    for name in ("prompt", "sampling", "max_tokens", "logprobs", "session", "cache_key", "reuse_prefix", "speculation"):
        if message.HasField(name):
            fields.refuse(name, "does not go with resume; it is that of the generation that goes on")
    if message.stop:
        fields.refuse("stop", "does not go with resume; it is that of the generation that goes on")
    if not message.HasField("slot_id"):
        fields.refuse("slot_id", "has to name the slot whose generation goes on")
    limit = _read_seconds(message, fields)
    fields.check()
    return Request(
        id=request_id,
        tokens=(),
        sampling=sampling.DEFAULTS,
        slot_id=message.slot_id,
        progress=message.progress,
        arrived=now,
        time_limit_at=None if limit is None else now + limit,
        deadline_at=deadline,
    )


def _read_prompt(message: pb.Prompt, fields: Fields) -> Prompt | None:
    given = [name for name in ("text", "tokens", "chat") if message.HasField(name)]
    if len(given) != 1:
        return None
    match given[0]:
        case "text":
            text = message.text
            if not text.text:
                fields.refuse("prompt.text.text", "is empty; at least 1 character")
            return TextPrompt(text.text, not text.HasField("add_special") or text.add_special, text.parse_special)
        case "tokens":
            if not message.tokens.ids:
                fields.refuse("prompt.tokens.ids", "is empty; at least 1 token")
            return TokenPrompt(tuple(message.tokens.ids))
        case _:
            return read_chat(message.chat, fields)


def read_chat(message: pb.ChatPrompt, fields: Fields) -> ChatPrompt:
    if not 1 <= len(message.messages) <= MAX_MESSAGES:
        fields.refuse("prompt.chat.messages", f"{len(message.messages)} messages; 1 to {MAX_MESSAGES}")
    return ChatPrompt(
        messages=tuple(Message(entry.role, entry.content) for entry in message.messages),
        add_generation_prompt=not message.HasField("add_generation_prompt") or message.add_generation_prompt,
        parse_special=message.parse_special,
        arguments=MessageToDict(message.template_arguments),
    )


def _read_speculation(message: pb.SpeculationOptions, fields: Fields) -> DraftOptions:
    at = "speculation."
    n_max = fields.integer(message, at + "n_max", 0, 0, _UINT32_MAX) if message.HasField("n_max") else None
    options = DraftOptions(
        n_max=0 if message.HasField("enabled") and not message.enabled else n_max,
        n_min=fields.integer(message, at + "n_min", 0, 0, _UINT32_MAX),
        p_min=fields.number(message, at + "p_min", 0, 0, 1),
    )
    if options.n_max and options.n_min > options.n_max:
        fields.refuse(at + "n_min", f"{options.n_min} is more than n_max, which is {options.n_max}")
    return options


def _read_seconds(message: pb.GenerateRequest, fields: Fields) -> float | None:
    if not message.HasField("time_limit"):
        return None
    seconds = message.time_limit.seconds + message.time_limit.nanos * 1e-9
    if seconds <= 0:
        fields.refuse("time_limit", f"{seconds:g} s is not above 0")
    return seconds


def read_text(message: pb.TokenizeRequest) -> str:
    """The text to tokenize, given as a string or as UTF-8."""
    if message.HasField("text") == message.HasField("text_bytes"):
        raise InvalidRequest(FieldViolation("text", "give one of text and text_bytes"))
    if message.HasField("text"):
        return message.text
    try:
        return message.text_bytes.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            FieldViolation("text_bytes", f"is no UTF-8: byte {error.start} ({error.reason})"),
            reason="INVALID_UTF8",
            offset=error.start,
        ) from None


def write_event(
    event: Event, request: Request, pieces: Sequence[bytes], *, timings: bool
) -> pb.GenerateResponse:  # fmt: skip
    """One event of a stream; `pieces` are the vocabulary's."""
    match event:
        case Delta(text, tokens, logprobs):
            delta = pb.Delta(text=text, token_ids=tokens)
            if logprobs:
                delta.logprobs.extend(_write_logprob(entry, pieces) for entry in logprobs)
            return pb.GenerateResponse(delta=delta)
        case Started(slot_id, prompt_tokens, reused_tokens):
            return pb.GenerateResponse(
                started=pb.Started(
                    request_id=request.id,
                    slot_id=slot_id,
                    prompt_tokens=prompt_tokens,
                    reused_tokens=reused_tokens,
                    seed=request.sampling.seed,
                )
            )
        case Progress(processed_tokens, prompt_tokens):
            return pb.GenerateResponse(
                progress=pb.Progress(processed_tokens=processed_tokens, prompt_tokens=prompt_tokens)
            )
        case Finished():
            return pb.GenerateResponse(finished=_write_finished(event, timings=timings))


def _write_finished(event: Finished, *, timings: bool) -> pb.Finished:
    usage = pb.Usage(
        prompt_tokens=event.usage.prompt, reused_tokens=event.usage.reused, generated_tokens=event.usage.generated
    )
    finished = pb.Finished(reason=_REASONS[event.reason], stop=event.stop, usage=usage)
    if timings:
        spent = event.timings
        finished.timings.queue.CopyFrom(duration(spent.queue))
        finished.timings.prompt.CopyFrom(duration(spent.prompt))
        finished.timings.generation.CopyFrom(duration(spent.generation))
    if event.speculation.drafted:
        finished.speculation.CopyFrom(_write_speculation(event.speculation))
    return finished


def _write_speculation(spent: Speculation) -> pb.Speculation:
    return pb.Speculation(
        drafted_tokens=spent.drafted,
        accepted_tokens=spent.accepted,
        rounds=spent.rounds,
        accepted_per_position=spent.accepted_at,
        replayed_tokens=spent.replayed,
        draft_time=duration(spent.draft_seconds),
    )


def _write_logprob(entry: TokenLogprob, pieces: Sequence[bytes]) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token=pb.LogprobEntry(token_id=entry.token, logprob=entry.logprob, piece=pieces[entry.token]),
        top=[pb.LogprobEntry(token_id=token, logprob=value, piece=pieces[token]) for token, value in entry.top],
    )


def write_slot(slot: SlotInfo) -> slot_pb2.Slot:
    message = slot_pb2.Slot(
        id=slot.id,
        state=_STATES[slot.state],
        cached_tokens=slot.cached_tokens,
        prompt_tokens=slot.prompt_tokens,
        reused_tokens=slot.reused_tokens,
        generated_tokens=slot.generated_tokens,
        context_tokens=slot.context_tokens,
        session=slot.session,
        request_id=slot.request_id,
    )
    if slot.last_used is not None:
        message.last_used.CopyFrom(timestamp(slot.last_used))
    return message


def duration(seconds: float) -> Duration:
    value = Duration()
    value.FromNanoseconds(round(seconds * 1e9))
    return value


def timestamp(epoch_seconds: float) -> Timestamp:
    value = Timestamp()
    value.FromNanoseconds(round(epoch_seconds * 1e9))
    return value
