"""Samplers: llama.cpp's chains, and a short path where the largest logit is the answer.

The order of the stages, the handling of grammars and the meaning of the defaults are llama-server's
(`common/sampling.cpp`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from typing import Any

import llama_cpp
import numpy as np

from service.engine.batch import Logits
from service.engine.llama import library
from service.engine.llama.vocabulary import Vocabulary
from service.engine.types import Sampling
from service.errors import EngineFailure, Exhausted, FieldViolation, InvalidRequest

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_MIN_KEEP = 1
GRAMMAR_SECONDS = 0.5
"""Processor time that a grammar may take for one token."""


class GreedySampler:
    """Takes the largest logit; where several are equal the lowest token, as llama.cpp does.

    `forbidden` tokens are passed over.
    """

    def __init__(self, forbidden: Iterable[int] = ()) -> None:
        self._forbidden = list(forbidden)

    draws = 0

    def resume(self, tokens: Sequence[int], draws: int) -> None:
        """There is nothing to remember."""

    def draw(self, logits: Logits) -> int:
        token = int(logits.argmax())
        if token in self._forbidden:
            logits = logits.copy()
            logits[self._forbidden] = -np.inf
            token = int(logits.argmax())
        return token

    def close(self) -> None:
        """Holds nothing."""


class ChainSampler:
    """A chain of llama.cpp's samplers, with a grammar beside it where one is asked for.

    `prompt` is what the penalties look back at. Raises InvalidRequest for a grammar that llama.cpp refuses.
    """

    def __init__(
        self, vocabulary: Vocabulary, handle: Any, sampling: Sampling, prompt: Sequence[int], context: int
    ) -> None:
        self.draws = 0
        self._end_tokens = vocabulary.end_tokens
        self._candidates = _Candidates(vocabulary.size)
        self._grammar: Any = None
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        try:
            for stage in _stages(vocabulary, handle, sampling, context):
                llama_cpp.llama_sampler_chain_add(self._chain, stage)
            if sampling.grammar is not None:
                self._grammar = _grammar(handle, sampling.grammar)
        except BaseException:
            self.close()
            raise
        lookback = _lookback(sampling, context)
        for token in prompt[-lookback:] if lookback else ():
            llama_cpp.llama_sampler_accept(self._chain, token)

    def resume(self, tokens: Sequence[int], draws: int) -> None:
        """Each draw takes one random number, whatever there is to choose from. Not for samplers that learn from the
        logits (mirostat) or draw depending on them (XTC).

        Raises InvalidRequest for tokens that the grammar does not allow: accepting one would abort the process.
        """
        for _ in range(draws):
            self._candidates.pick_only(self._chain)
        self.draws = draws
        for token in tokens:
            if self._grammar is not None and not self._candidates.allows(self._grammar, token):
                violation = FieldViolation("resume", f"the grammar does not allow token {token}, which was generated")
                raise InvalidRequest(violation, reason="NOT_RESUMABLE")
            self._accept(token)

    def draw(self, logits: Logits) -> int:
        self.draws += 1
        if self._grammar is not None:
            return self._draw_timed(logits)
        token = self._candidates.pick(logits, self._chain)
        llama_cpp.llama_sampler_accept(self._chain, token)
        return token

    def close(self) -> None:
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None
        if self._grammar is not None:
            llama_cpp.llama_sampler_free(self._grammar)
            self._grammar = None

    def _draw_timed(self, logits: Logits) -> int:
        """Draw under the grammar, and give up on one whose ambiguity grows beyond all bounds: all others wait for it.

        It grows by a factor from token to token, so that the last draw is not much longer than the limit.
        """
        began = time.thread_time()
        token = self._candidates.pick(logits, self._chain)
        if not self._candidates.allows(self._grammar, token):
            token = self._draw_within_grammar(logits)
        if token not in self._end_tokens:
            self._accept(token)
        spent = time.thread_time() - began
        if spent > GRAMMAR_SECONDS:
            raise Exhausted(
                f"the grammar needs {spent:.1f} s of processor time for a token, the limit is {GRAMMAR_SECONDS:g}; "
                "it is too ambiguous",
                reason="GRAMMAR_TOO_SLOW",
            )
        return token

    def _accept(self, token: int) -> None:
        if self._grammar is not None:
            llama_cpp.llama_sampler_accept(self._grammar, token)
        llama_cpp.llama_sampler_accept(self._chain, token)

    def _draw_within_grammar(self, logits: Logits) -> int:
        """Draw among the tokens that the grammar allows. Accepting any other token would abort the process."""
        self.draws += 1
        token = self._candidates.pick(logits, self._grammar, self._chain)
        if self._candidates.allows(self._grammar, token):
            return token
        # the options forbid all that the grammar allows; if it is complete, the text is, too
        for end in self._end_tokens:
            if self._candidates.allows(self._grammar, end):
                return end
        raise EngineFailure("the grammar allows none of the model's tokens here", reason="GRAMMAR_DEAD_END")


class _Candidates:
    """The array of candidates that samplers work on, kept between draws."""

    def __init__(self, size: int) -> None:
        self._ids = np.arange(size, dtype=np.int32)
        self._data = np.empty(size, _CANDIDATE)
        self._address = self._data.ctypes.data_as(llama_cpp.llama_token_data_p)
        self._single = llama_cpp.llama_token_data()
        self._single_array = llama_cpp.llama_token_data_array(
            data=ctypes.pointer(self._single), size=1, selected=-1, sorted=False
        )

    def pick(self, logits: Logits, *samplers: Any) -> int:
        """Run the samplers over all tokens; returns the one that the last of them selected."""
        self._data["id"] = self._ids
        self._data["logit"] = logits
        array = llama_cpp.llama_token_data_array(data=self._address, size=len(self._ids), selected=-1, sorted=False)
        for sampler in samplers:
            llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        if not 0 <= array.selected < array.size:
            raise EngineFailure("no token is left to draw", reason="NO_CANDIDATES")
        return int(array.data[array.selected].id)

    def pick_only(self, sampler: Any) -> None:
        """Let a sampler choose where there is but one candidate."""
        self._single.id, self._single.logit, self._single.p = 0, 0.0, 0.0
        self._single_array.size, self._single_array.selected = 1, -1
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(self._single_array))

    def allows(self, grammar: Any, token: int) -> bool:
        """Whether the grammar lets `token` stand next. Much cheaper than asking it about all tokens."""
        self._single.id, self._single.logit, self._single.p = token, 1.0, 0.0
        self._single_array.selected = -1
        llama_cpp.llama_sampler_apply(grammar, ctypes.byref(self._single_array))
        return bool(np.isfinite(self._single.logit))


def _lookback(sampling: Sampling, context: int) -> int:
    """Tokens of the prompt that some stage looks back at."""
    penalties = 0 if sampling.penalties.neutral else sampling.penalties.window
    dry = 0 if sampling.dry.multiplier == 0 else sampling.dry.window
    return max(_window(penalties, context), _window(dry, context))


def _window(window: int, context: int) -> int:
    return context if window < 0 else min(window, context)


def _grammar(handle: Any, gbnf: str) -> Any:
    library.clear_complaints()
    grammar = llama_cpp.llama_sampler_init_grammar(handle, gbnf.encode(), b"root")
    if not grammar:
        why = library.last_complaint("llama.cpp refused it")
        raise InvalidRequest(FieldViolation("sampling.grammar", why), reason="INVALID_GRAMMAR")
    return grammar


def _stages(vocabulary: Vocabulary, handle: Any, sampling: Sampling, context: int) -> list[Any]:
    """The samplers of the chain, in llama-server's order; the chain takes them over."""
    bias = dict(sampling.logit_bias)
    if sampling.ignore_eos:
        bias.update(dict.fromkeys(vocabulary.end_tokens, -float("inf")))
    stages = []
    if bias:
        entries = (llama_cpp.llama_logit_bias * len(bias))(*(tuple(entry) for entry in bias.items()))
        stages.append(llama_cpp.llama_sampler_init_logit_bias(vocabulary.size, len(bias), entries))
    penalties = sampling.penalties
    if not penalties.neutral:
        window = _window(penalties.window, context)
        stages.append(
            llama_cpp.llama_sampler_init_penalties(
                vocabulary.size, window, penalties.repeat, penalties.frequency, penalties.presence
            )
        )
    if sampling.dry.multiplier != 0:
        stages.append(_dry(handle, sampling, context))
    return stages + (_choose_greedily() if sampling.temperature == 0 else _choose_at_random(sampling))


def _choose_greedily() -> list[Any]:
    return [llama_cpp.llama_sampler_init_greedy()]


def _choose_at_random(sampling: Sampling) -> list[Any]:
    seed, temperature = sampling.seed, llama_cpp.llama_sampler_init_temp(sampling.temperature)
    if sampling.mirostat is not None:
        mirostat = sampling.mirostat
        return [temperature, llama_cpp.llama_sampler_init_mirostat_v2(seed, mirostat.tau, mirostat.eta)]
    xtc = sampling.xtc
    return [
        llama_cpp.llama_sampler_init_top_n_sigma(sampling.top_n_sigma),
        llama_cpp.llama_sampler_init_top_k(sampling.top_k),
        llama_cpp.llama_sampler_init_typical(sampling.typical_p, _MIN_KEEP),
        llama_cpp.llama_sampler_init_top_p(sampling.top_p, _MIN_KEEP),
        llama_cpp.llama_sampler_init_min_p(sampling.min_p, _MIN_KEEP),
        llama_cpp.llama_sampler_init_xtc(xtc.probability, xtc.threshold, _MIN_KEEP, seed),
        temperature,
        llama_cpp.llama_sampler_init_dist(seed),
    ]


def _dry(handle: Any, sampling: Sampling, context: int) -> Any:
    dry = sampling.dry
    breakers = [text.encode() for text in dry.sequence_breakers]
    return llama_cpp.llama_sampler_init_dry(
        handle,
        dry.multiplier,
        dry.base,
        dry.allowed_length,
        _window(dry.window, context),
        (ctypes.c_char_p * len(breakers))(*breakers),
        len(breakers),
    )
