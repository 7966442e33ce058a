"""A generation in the middle of its text, as the JSON object that goes with a state, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from service.engine.types import Paused, Request
from service.errors import FieldViolation, InvalidRequest
from service.rpc import sampling, wire
from slotwire.v1 import generation_pb2 as pb

_MOST_DRAWS = 1 << 24


def encode(paused: Paused) -> dict[str, Any]:
    """`request` is a GenerateRequest without its prompt, which are the first `prompt_tokens` of the state's tokens."""
    return {
        "request": MessageToDict(_message(paused.request), preserving_proto_field_name=True),
        "prompt_tokens": len(paused.request.tokens),
        "draws": paused.draws,
    }


def decode(value: Mapping[str, Any], tokens: tuple[int, ...], pending: int | None) -> Paused:
    """`tokens` are those of the state, `pending` the one behind them. Raises InvalidRequest."""
    count, draws = value.get("prompt_tokens"), value.get("draws")
    if not isinstance(count, int) or not 1 <= count <= len(tokens):
        raise _refused("prompt_tokens", f"{count!r} is not in [1, {len(tokens)}]")
    if not isinstance(draws, int) or not 0 <= draws <= _MOST_DRAWS:
        raise _refused("draws", f"{draws!r} is not in [0, {_MOST_DRAWS}]")
    if pending is None:
        raise _refused("pending_token", "is missing")
    try:
        message = ParseDict(value.get("request", {}), pb.GenerateRequest(), ignore_unknown_fields=True)
    except (ParseError, TypeError, AttributeError) as error:
        raise _refused("request", f"is no GenerateRequest: {error}") from None
    message.prompt.Clear()
    message.prompt.tokens.ids.extend(tokens[:count])
    draft = wire.read_generate(message, "", 0.0, None)
    if draft.json_schema is not None:
        raise _refused("request.sampling.grammar", "is a schema, not a grammar")
    return Paused(wire.whole(draft), (*tokens[count:], pending), draws)


def _message(request: Request) -> pb.GenerateRequest:
    """All that decides the text, and how it is told."""
    message = pb.GenerateRequest(
        sampling=sampling.write(request.sampling),
        max_tokens=request.max_tokens,
        stop=request.stop,
        logprobs=request.logprobs,
        speculation=pb.SpeculationOptions(
            n_max=request.draft.n_max, n_min=request.draft.n_min, p_min=request.draft.p_min
        ),
    )
    message.sampling.seed = request.sampling.seed
    message.sampling.logit_bias.update(request.sampling.logit_bias)
    if request.sampling.grammar is not None:
        message.sampling.grammar.gbnf = request.sampling.grammar
    return message


def _refused(field: str, description: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(f"manifest.sampling.{field}", description), reason="BAD_MANIFEST")
