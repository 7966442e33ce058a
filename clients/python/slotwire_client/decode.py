"""Turns messages of the contract into the client's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from slotwire.v1 import generation_pb2, sampling_pb2, slot_pb2, system_pb2
from slotwire_client import info, types

_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_END_OF_TEXT: types.FinishReason.END_OF_TEXT,
    generation_pb2.FINISH_REASON_STOP: types.FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: types.FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_CONTEXT_FULL: types.FinishReason.CONTEXT_FULL,
    generation_pb2.FINISH_REASON_TIME_LIMIT: types.FinishReason.TIME_LIMIT,
}
_SLOT_STATES = {
    slot_pb2.SLOT_STATE_IDLE: types.SlotState.IDLE,
    slot_pb2.SLOT_STATE_PROMPT: types.SlotState.PROMPT,
    slot_pb2.SLOT_STATE_GENERATING: types.SlotState.GENERATING,
}
_SERVER_STATES = {
    system_pb2.SERVER_STATE_LOADING: info.ServerState.LOADING,
    system_pb2.SERVER_STATE_READY: info.ServerState.READY,
    system_pb2.SERVER_STATE_DRAINING: info.ServerState.DRAINING,
    system_pb2.SERVER_STATE_FAILED: info.ServerState.FAILED,
}
_ROLLBACKS = {
    system_pb2.ROLLBACK_TRIM: info.Rollback.TRIM,
    system_pb2.ROLLBACK_SNAPSHOTS: info.Rollback.SNAPSHOTS,
    system_pb2.ROLLBACK_CHECKPOINT: info.Rollback.CHECKPOINT,
}
_SAMPLING = types.GenerateOptions.__annotations__.keys()
_STAGES = {"xtc": types.Xtc, "dry": types.Dry, "penalties": types.Penalties, "mirostat": types.Mirostat}


def event(message: generation_pb2.GenerateResponse) -> types.Event | None:
    """One event of a stream; None for a kind that only a newer server knows."""
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return types.Started(
                started.request_id, started.slot_id, started.prompt_tokens, started.reused_tokens, started.seed
            )
        case "progress":
            return types.Progress(message.progress.processed_tokens, message.progress.prompt_tokens)
        case "delta":
            delta = message.delta
            return types.Delta(delta.text, tuple(delta.token_ids), tuple(map(_token_logprob, delta.logprobs)))
        case "finished":
            return _finished(message.finished)
        case _:
            return None


def slot(message: slot_pb2.Slot) -> types.Slot:
    """A slot."""
    return types.Slot(
        id=message.id,
        state=_SLOT_STATES.get(message.state, types.SlotState.UNKNOWN),
        cached_tokens=message.cached_tokens,
        prompt_tokens=message.prompt_tokens,
        reused_tokens=message.reused_tokens,
        generated_tokens=message.generated_tokens,
        context_tokens=message.context_tokens,
        session=message.session if message.HasField("session") else None,
        request_id=message.request_id if message.HasField("request_id") else None,
        last_used=_time(message.last_used) if message.HasField("last_used") else None,
    )


def server_info(message: system_pb2.GetServerInfoResponse) -> info.ServerInfo:
    """A server."""
    return info.ServerInfo(
        version=message.version,
        runtime_version=message.runtime_version,
        system_info=message.system_info,
        state=_SERVER_STATES.get(message.state, info.ServerState.UNKNOWN),
        load_progress=message.load_progress,
        started_at=_time(message.started_at) if message.HasField("started_at") else None,
    )


def model_info(message: system_pb2.GetModelInfoResponse) -> info.ModelInfo:
    """The loaded model."""
    found = message.capabilities
    return info.ModelInfo(
        name=message.name,
        description=message.description,
        architecture=message.architecture,
        parameters=message.parameters,
        size_bytes=message.size_bytes,
        vocabulary_size=message.vocabulary_size,
        embedding_size=message.embedding_size,
        layers=message.layers,
        trained_context_tokens=message.trained_context_tokens,
        context_tokens=message.context_tokens,
        slot_context_tokens=message.slot_context_tokens,
        slots=message.slots,
        capabilities=info.Capabilities(
            trim=found.trim,
            recurrent=found.recurrent,
            hybrid=found.hybrid,
            sliding_window=found.sliding_window,
            chat=found.chat,
            rollback=_ROLLBACKS.get(found.rollback, info.Rollback.UNKNOWN),
            deterministic=found.deterministic,
            draft_ngram=found.draft_ngram,
            draft_model=found.draft_model,
        ),
        chat_template=message.chat_template,
        sampling_defaults=_sampling(message.sampling_defaults),
    )


def load(message: system_pb2.GetLoadResponse) -> info.Load:
    """The load of a server."""
    return info.Load(
        slots=message.slots,
        busy_slots=message.busy_slots,
        queued_requests=message.queued_requests,
        queue_limit=message.queue_limit,
        cached_tokens=message.cached_tokens,
        context_tokens=message.context_tokens,
        requests=message.requests,
        prompt_tokens=message.prompt_tokens,
        reused_tokens=message.reused_tokens,
        generated_tokens=message.generated_tokens,
        steps=message.steps,
        prompt_tokens_per_second=message.prompt_tokens_per_second,
        generated_tokens_per_second=message.generated_tokens_per_second,
        rows_per_step=message.rows_per_step,
        step_seconds=_seconds(message.step_time),
        memory_bytes=message.memory_bytes,
        busy_seconds=_seconds(message.busy_time),
        decode_seconds=_seconds(message.decode_time),
        decodes=message.decodes,
        rounds=message.rounds,
        flushes=message.flushes,
        checkpoints=message.checkpoints,
        drafted_tokens=message.drafted_tokens,
        accepted_tokens=message.accepted_tokens,
        replayed_tokens=message.replayed_tokens,
        draft_seconds=_seconds(message.draft_time),
        shelved_states=message.shelved_states,
        shelved_bytes=message.shelved_bytes,
        fetched_tokens=message.fetched_tokens,
    )


def _finished(message: generation_pb2.Finished) -> types.Finished:
    usage, timings = message.usage, message.timings
    return types.Finished(
        reason=_FINISH_REASONS.get(message.reason, types.FinishReason.UNKNOWN),
        stop=message.stop,
        usage=types.Usage(usage.prompt_tokens, usage.reused_tokens, usage.generated_tokens),
        timings=types.Timings(_seconds(timings.queue), _seconds(timings.prompt), _seconds(timings.generation))
        if message.HasField("timings")
        else None,
        speculation=_speculation(message.speculation) if message.HasField("speculation") else None,
    )


def _speculation(message: generation_pb2.Speculation) -> types.Speculation:
    return types.Speculation(
        drafted_tokens=message.drafted_tokens,
        accepted_tokens=message.accepted_tokens,
        rounds=message.rounds,
        accepted_per_position=tuple(message.accepted_per_position),
        replayed_tokens=message.replayed_tokens,
        draft_seconds=_seconds(message.draft_time),
    )


def _token_logprob(message: generation_pb2.TokenLogprob) -> types.TokenLogprob:
    return types.TokenLogprob(_logprob_entry(message.token), tuple(map(_logprob_entry, message.top)))


def _logprob_entry(message: generation_pb2.LogprobEntry) -> types.LogprobEntry:
    return types.LogprobEntry(message.token_id, message.logprob, message.piece)


def _sampling(message: sampling_pb2.SamplingOptions) -> types.GenerateOptions:
    """The options that are set, as keyword arguments of `Client.generate`."""
    options = {field.name: _plain(value) for field, value in message.ListFields() if field.name in _SAMPLING}
    for name, stage in _STAGES.items():
        if name in options:
            options[name] = stage(**{field.name: _plain(value) for field, value in options[name].ListFields()})
    return cast("types.GenerateOptions", options)


def _plain(value: Any) -> Any:
    """A field's value for Python: a float as short as its 32 bits allow, a list as a tuple, a map as a dict."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(value)
    return value


def _seconds(message: Duration) -> float:
    return message.seconds + message.nanos / 1e9


def _time(message: Timestamp) -> datetime:
    return message.ToDatetime(tzinfo=UTC)
