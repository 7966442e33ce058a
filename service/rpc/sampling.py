"""Sampling options: protobuf to domain and back."""

from __future__ import annotations

import math

from service.engine.types import Dry, Mirostat, Penalties, Sampling, Xtc
from service.rpc.fields import Fields
from slotwire.v1 import sampling_pb2 as pb

DEFAULTS = Sampling()
MAX_SEED = 2**32 - 2  # the largest one means "random" to llama.cpp
_INT32_MAX = 2**31 - 1
_MAX_BIASES = 65_536
_MAX_BREAKERS, _MAX_BREAKER_BYTES = 64, 40  # llama.cpp cuts longer ones


def read(message: pb.SamplingOptions, fields: Fields, seed: int) -> Sampling:
    """The options with defaults filled in; `seed` is taken where the caller sent none. The grammar is read apart."""
    at = "sampling."
    return Sampling(
        temperature=fields.number(message, at + "temperature", DEFAULTS.temperature, 0, 100),
        top_k=fields.integer(message, at + "top_k", DEFAULTS.top_k, 0, _INT32_MAX),
        top_p=fields.number(message, at + "top_p", DEFAULTS.top_p, 0, 1, above=True),
        min_p=fields.number(message, at + "min_p", DEFAULTS.min_p, 0, 1),
        typical_p=fields.number(message, at + "typical_p", DEFAULTS.typical_p, 0, 1, above=True),
        top_n_sigma=fields.number(message, at + "top_n_sigma", DEFAULTS.top_n_sigma, 0, 100),
        xtc=Xtc(
            probability=fields.number(message.xtc, at + "xtc.probability", DEFAULTS.xtc.probability, 0, 1),
            threshold=fields.number(message.xtc, at + "xtc.threshold", DEFAULTS.xtc.threshold, 0, 1),
        ),
        dry=_read_dry(message.dry, fields),
        penalties=_read_penalties(message.penalties, fields),
        mirostat=_read_mirostat(message.mirostat, fields) if message.HasField("mirostat") else None,
        logit_bias=_read_bias(message, fields),
        seed=fields.integer(message, at + "seed", seed, 0, MAX_SEED),
        ignore_eos=message.ignore_eos,
    )


def _read_dry(message: pb.DryOptions, fields: Fields) -> Dry:
    at, default = "sampling.dry.", DEFAULTS.dry
    breakers = fields.strings(
        message.sequence_breakers, at + "sequence_breakers", _MAX_BREAKERS, _MAX_BREAKER_BYTES
    )  # fmt: skip
    for index, text in enumerate(breakers):
        if "\0" in text:
            fields.refuse(f"{at}sequence_breakers[{index}]", "has a NUL character")
    return Dry(
        multiplier=fields.number(message, at + "multiplier", default.multiplier, 0, 100),
        base=fields.number(message, at + "base", default.base, 1, 100),
        allowed_length=fields.integer(message, at + "allowed_length", default.allowed_length, 1, _INT32_MAX),
        window=fields.integer(message, at + "window", default.window, -1, _INT32_MAX),
        sequence_breakers=breakers or default.sequence_breakers,
    )


def _read_penalties(message: pb.PenaltyOptions, fields: Fields) -> Penalties:
    at, default = "sampling.penalties.", DEFAULTS.penalties
    return Penalties(
        window=fields.integer(message, at + "window", default.window, -1, _INT32_MAX),
        repeat=fields.number(message, at + "repeat", default.repeat, 0, 100, above=True),
        frequency=fields.number(message, at + "frequency", default.frequency, -100, 100),
        presence=fields.number(message, at + "presence", default.presence, -100, 100),
    )


def _read_mirostat(message: pb.MirostatOptions, fields: Fields) -> Mirostat:
    at, default = "sampling.mirostat.", Mirostat()
    return Mirostat(
        tau=fields.number(message, at + "tau", default.tau, 0, 100, above=True),
        eta=fields.number(message, at + "eta", default.eta, 0, 1, above=True),
    )


def _read_bias(message: pb.SamplingOptions, fields: Fields) -> dict[int, float]:
    if len(message.logit_bias) > _MAX_BIASES:
        fields.refuse("sampling.logit_bias", f"{len(message.logit_bias)} entries; at most {_MAX_BIASES}")
        return {}
    for token, bias in message.logit_bias.items():
        if math.isnan(bias) or bias == math.inf:
            fields.refuse(f"sampling.logit_bias[{token}]", f"{bias} is not in [-inf, inf)")
    return dict(message.logit_bias)


def write(sampling: Sampling) -> pb.SamplingOptions:
    """All options spelled out, except seed, bias and grammar, which have no defaults."""
    return pb.SamplingOptions(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        top_n_sigma=sampling.top_n_sigma,
        xtc=pb.XtcOptions(probability=sampling.xtc.probability, threshold=sampling.xtc.threshold),
        dry=pb.DryOptions(
            multiplier=sampling.dry.multiplier,
            base=sampling.dry.base,
            allowed_length=sampling.dry.allowed_length,
            window=sampling.dry.window,
            sequence_breakers=sampling.dry.sequence_breakers,
        ),
        penalties=pb.PenaltyOptions(
            window=sampling.penalties.window,
            repeat=sampling.penalties.repeat,
            frequency=sampling.penalties.frequency,
            presence=sampling.penalties.presence,
        ),
        ignore_eos=sampling.ignore_eos,
    )
