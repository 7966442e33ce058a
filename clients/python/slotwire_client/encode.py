"""Turns the client's values into messages of the contract."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from slotwire.v1 import generation_pb2, sampling_pb2
from slotwire_client.types import ChatMessage, GenerateOptions, Prompt

_SAMPLING_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "seed",
    "ignore_eos",
)
_SAMPLING_STAGES = ("xtc", "dry", "penalties", "mirostat")
_REQUEST_SCALARS = (
    "max_tokens",
    "logprobs",
    "slot_id",
    "session",
    "cache_key",
    "reuse_prefix",
    "progress",
    "timings",
)
_PROMPT_OPTIONS = {
    "text": ("add_special", "parse_special"),
    "tokens": (),
    "chat": ("add_generation_prompt", "parse_special", "template_arguments"),
}
_KNOWN_OPTIONS = frozenset(GenerateOptions.__annotations__)


def generate_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """The request for a generation.

    Raises:
        ValueError: an option does not fit the prompt, or a value does not fit the contract.
        TypeError: an option is unknown or has the wrong type.
    """
    if unknown := options.keys() - _KNOWN_OPTIONS:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    request = generation_pb2.GenerateRequest(prompt=_prompt(prompt, options))
    _set_fields(request, {name: options.get(name) for name in _REQUEST_SCALARS})
    request.stop.extend(options.get("stop") or ())
    if (limit := options.get("time_limit")) is not None:
        request.time_limit.CopyFrom(_duration(limit))
    if (speculation := options.get("speculation")) is not None:
        request.speculation.SetInParent()
        _set_message(request.speculation, "speculation", speculation)
    sampling = _sampling(options)
    if sampling.ByteSize():
        request.sampling.CopyFrom(sampling)
    return request


def chat_prompt(messages: Iterable[ChatMessage], options: GenerateOptions) -> generation_pb2.ChatPrompt:
    """A conversation, with those of the options that concern it. Raises as `generate_request` does."""
    prompt = generation_pb2.ChatPrompt(
        messages=[generation_pb2.ChatMessage(role=message.role, content=message.content) for message in messages]
    )
    _set_fields(prompt, {name: options.get(name) for name in ("add_generation_prompt", "parse_special")})
    if (arguments := options.get("template_arguments")) is not None:
        prompt.template_arguments.CopyFrom(_struct(arguments))
    return prompt


def _prompt(prompt: Prompt, options: GenerateOptions) -> generation_pb2.Prompt:
    if isinstance(prompt, str):
        kind = "text"
        text = generation_pb2.TextPrompt(text=prompt)
        _set_fields(text, {name: options.get(name) for name in _PROMPT_OPTIONS["text"]})
        message = generation_pb2.Prompt(text=text)
    elif len(prompt) and isinstance(prompt[0], ChatMessage):
        kind = "chat"
        conversation = [item for item in prompt if isinstance(item, ChatMessage)]
        if len(conversation) != len(prompt):
            raise TypeError("a conversation holds ChatMessage and nothing else")
        message = generation_pb2.Prompt(chat=chat_prompt(conversation, options))
    else:
        kind = "tokens"
        tokens = generation_pb2.TokenPrompt()
        _set_fields(tokens, {"ids": prompt})
        message = generation_pb2.Prompt(tokens=tokens)
    for name in {name for names in _PROMPT_OPTIONS.values() for name in names} - set(_PROMPT_OPTIONS[kind]):
        if options.get(name) is not None:
            raise ValueError(f"{name} does not go with a prompt of kind {kind}")
    return message


def _sampling(options: GenerateOptions) -> sampling_pb2.SamplingOptions:
    sampling = sampling_pb2.SamplingOptions()
    _set_fields(sampling, {name: options.get(name) for name in _SAMPLING_SCALARS})
    for name in _SAMPLING_STAGES:
        stage: Any = options.get(name)
        if stage is not None:
            target = getattr(sampling, name)
            target.SetInParent()
            _set_message(target, name, stage)
    if bias := options.get("logit_bias"):
        _set_fields(sampling, {"logit_bias": bias})
    if (grammar := options.get("grammar")) is not None:
        sampling.grammar.gbnf = grammar
    if (schema := options.get("json_schema")) is not None:
        sampling.grammar.json_schema = schema if isinstance(schema, str) else json.dumps(schema)
    return sampling


def _set_message(message: Message, name: str, value: Any) -> None:
    """Sets the fields of a message from a dataclass with the same ones."""
    _set_fields(message, {field.name: getattr(value, field.name) for field in fields(value)}, prefix=f"{name}.")


def _set_fields(message: Message, values: Mapping[str, Any], prefix: str = "") -> None:
    """Sets what is not None; the name of the field is put into the error, which protobuf leaves out."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            if isinstance(value, Mapping):
                getattr(message, name).update(value)
            elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{prefix}{name}: {error}") from None


def _duration(seconds: float) -> Duration:
    if not 0 <= seconds < 10_000 * 365 * 86_400:
        raise ValueError(f"time_limit: {seconds} is not a number of seconds that a request can last")
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _struct(values: Mapping[str, Any]) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    try:
        struct.update(dict(values))
    except (TypeError, ValueError) as error:
        raise type(error)(f"template_arguments: {error}") from None
    return struct
