"""The self-test of deterministic decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from service.engine.batch import Decoder, DecodeStatus, Logits, Segment
from service.engine.llama import library
from service.errors import ConfigError

_STRIDE = 5  # tokens of a decode beside others
_COMPANY = 3  # tokens that the others have in it


class Subject(Decoder, Protocol):
    """A context. Its sequences up to `scratch` are empty."""

    scratch: int
    vocabulary: int
    micro_batch: int


def keeps_its_bits(context: Subject) -> bool:
    """Whether the same tokens give the same logits, bit for bit: computed at once, one by one, and beside others.

    Raises ConfigError where a decode fails.
    """
    dice = np.random.default_rng(0)
    count = min(2 * context.micro_batch + 3, context.size // 4, context.max_rows - 1)
    tokens, others = (dice.integers(0, context.vocabulary, count).tolist() for _ in range(2))
    outputs = min(4, context.max_outputs - 1)
    try:
        at_once = _scores(context, [Segment(0, tokens, 0, outputs)])
        return _alone(context, tokens, at_once) and _in_company(context, tokens, others, at_once)
    finally:
        for sequence in range(min(2, context.scratch)):
            context.keep(sequence, 0)


def _alone(context: Subject, tokens: Sequence[int], at_once: Sequence[Logits]) -> bool:
    context.keep(0, 0)
    for place, token in enumerate(tokens):
        scores = _scores(context, [Segment(0, [token], place, 1)])
        left = len(tokens) - place
        if left <= len(at_once) and not np.array_equal(scores[0], at_once[-left]):
            return False
    return True


def _in_company(context: Subject, tokens: Sequence[int], others: Sequence[int], at_once: Sequence[Logits]) -> bool:
    context.keep(0, 0)
    scores: list[Logits] = []
    for place in range(0, len(tokens), _STRIDE):
        start = place // _STRIDE * _COMPANY
        company = [Segment(1, others[start : start + _COMPANY], start, 1)] if context.scratch > 1 else []
        scores = _scores(context, [*company, Segment(0, tokens[place : place + _STRIDE], place, 1)])
    return np.array_equal(scores[-1], at_once[-1])


def _scores(context: Subject, segments: Sequence[Segment]) -> list[Logits]:
    if context.decode(segments) is not DecodeStatus.OK:
        raise ConfigError("context: a decode failed: " + library.last_complaint("no reason given"))
    return [context.logits(index).copy() for index in range(sum(segment.outputs for segment in segments))]
