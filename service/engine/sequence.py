"""One generation: the request on its way through prompt, tokens and text to its end. No I/O, no library."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np

from service.engine.batch import Logits, Sampler
from service.engine.tally import Tally
from service.engine.text import TextStream
from service.engine.types import (
    Delta,
    Finished,
    FinishReason,
    Request,
    Timings,
    TokenLogprob,
    Usage,
)


class Sequence:
    """A request with its sampler and what it has produced. Times are seconds of `time.monotonic`.

    With `generated` tokens it goes on behind them, and so does its sampler; `pieces` are the vocabulary's then.
    """

    def __init__(
        self, request: Request, sampler: Sampler, generated: Tokens[int] = (), pieces: Tokens[bytes] = ()
    ) -> None:
        self.request = request
        self.sampler = sampler
        self.reused = 0
        self.tokens: list[int] = list(generated)
        """All that were drawn."""
        self.reading = (*request.tokens, *generated[:-1]) if generated else request.tokens
        """What has to be in the memory before a token can be drawn."""
        self.pending: int | None = None
        """The newest token, whose state is not in the cache yet; None while the prompt is processed."""
        self.tally = Tally()
        self.started = self.first_token = 0.0
        self._text = TextStream(request.stop)
        self._unsent: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        for token in generated:  # what came of them was sent; what is held back is not
            self._text.push(pieces[token])

    @property
    def generated(self) -> int:
        """Tokens drawn."""
        return len(self.tokens)

    @property
    def resumed(self) -> bool:
        """Whether it goes on behind tokens that were drawn elsewhere, and none has been drawn since."""
        return self.pending is None and bool(self.tokens)

    def start(self, reused: int, now: float) -> None:
        self.reused, self.started = reused, now
        self.read(reused, now)

    def read(self, length: int, now: float) -> None:
        """The memory holds `length` tokens of what is to be read."""
        if self.resumed and length == len(self.reading):
            self.pending, self.first_token = self.tokens[-1], now

    def take(
        self, token: int, logits: Logits, pieces: Tokens[bytes], end_tokens: frozenset[int], now: float
    ) -> tuple[Delta | None, FinishReason | None]:
        """Accept the drawn token. Returns what can be sent, and why the text ends with it, if it does."""
        if not self.tokens:
            self.first_token = now
        self.tokens.append(token)
        self.pending = token
        if token in end_tokens:
            return None, FinishReason.END_OF_TEXT
        self._unsent.append(token)
        if self.request.logprobs is not None:
            self._logprobs.append(logprob(logits, token, self.request.logprobs))
        text = self._text.push(pieces[token])
        reason = None
        if self._text.stop:
            reason = FinishReason.STOP
        elif self.request.max_tokens is not None and self.generated >= self.request.max_tokens:
            reason = FinishReason.LENGTH
        return (self._delta(text) if text else None), reason

    def flush(self) -> Delta | None:
        """What was held back, at the end of the text."""
        text = self._text.finish()
        return self._delta(text) if text or self._unsent else None

    def finished(self, reason: FinishReason, now: float) -> Finished:
        first = self.first_token or now
        started = self.started or now
        return Finished(
            reason=reason,
            usage=Usage(len(self.request.tokens), self.reused, self.generated),
            timings=Timings(queue=started - self.request.arrived, prompt=first - started, generation=now - first),
            stop=self._text.stop if reason is FinishReason.STOP else "",
            speculation=self.tally.result(),
        )

    def _delta(self, text: str) -> Delta:
        delta = Delta(text, tuple(self._unsent), tuple(self._logprobs))
        self._unsent.clear()
        self._logprobs.clear()
        return delta


def logprob(logits: Logits, token: int, count: int) -> TokenLogprob:
    """Natural log probabilities of `token` and of the `count` likeliest tokens, under softmax over all logits."""
    best = logits.max()
    total = best + np.log(np.exp(logits - best).sum())
    top: tuple[tuple[int, float], ...] = ()
    if count:
        among = np.argpartition(logits, -count)[-count:] if count < len(logits) else np.arange(len(logits))
        order = among[np.lexsort((among, -logits[among]))]
        top = tuple((int(i), float(logits[i] - total)) for i in order)
    return TokenLogprob(token, float(logits[token] - total), top)
