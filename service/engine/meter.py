"""Counts and smoothed rates of the engine's work."""

from __future__ import annotations

from service.engine.types import Load

_WEIGHT = 0.1  # of the newest step


class Meter:
    """Counters since start; rates are smoothed over about the last ten steps of their kind."""

    def __init__(self) -> None:
        self._requests = self._prompt = self._reused = self._generated = self._steps = 0
        self._busy_seconds = self._decode_seconds = self._draft_seconds = 0.0
        self._decodes = self._rounds = self._flushes = self._checkpoints = 0
        self._drafted = self._accepted = self._replayed = 0
        self._verified = self._flushed = False  # in the step at hand
        self._prompt_rate = self._generation_rate = self._rows = self._seconds = 0.0

    def request(self, reused: int) -> None:
        """A request got a slot."""
        self._requests += 1
        self._reused += reused

    def decode(self, seconds: float) -> None:
        """The runner was at work this long, as a part of a step."""
        self._decodes += 1
        self._decode_seconds += seconds

    def draft(self, seconds: float) -> None:
        """Drafts took this long, as a part of a step."""
        self._draft_seconds += seconds

    def checkpoints(self, count: int) -> None:
        self._checkpoints += count

    def round(self, drafted: int, accepted: int) -> None:
        """A slot's draft was verified."""
        self._drafted += drafted
        self._accepted += accepted
        self._verified = True

    def replay(self, tokens: int) -> None:
        """Accepted tokens of a slot were computed again."""
        self._replayed += tokens
        self._flushed = self._flushed or tokens > 0

    def step(self, rows: int, prompt_rows: int, drawn: int, seconds: float) -> None:
        """A step was done: its rows, how many of them were of prompts, the tokens drawn, and its duration."""
        self._steps += 1
        self._rounds += self._verified
        self._flushes += self._flushed and not self._verified
        self._verified = self._flushed = False
        self._busy_seconds += seconds
        self._generated += drawn
        self._prompt += prompt_rows
        self._rows += _WEIGHT * (rows - self._rows)
        self._seconds += _WEIGHT * (seconds - self._seconds)
        if seconds > 0:
            self._generation_rate += _WEIGHT * (drawn / seconds - self._generation_rate)
            self._prompt_rate += _WEIGHT * (prompt_rows / seconds - self._prompt_rate)

    def load(
        self,
        *,
        slots: int,
        busy_slots: int,
        queued_requests: int,
        queue_limit: int,
        cached_tokens: int,
        context_tokens: int,
        shelved_states: int,
        shelved_bytes: int,
        fetched_tokens: int,
    ) -> Load:
        return Load(
            shelved_states=shelved_states,
            shelved_bytes=shelved_bytes,
            fetched_tokens=fetched_tokens,
            slots=slots,
            busy_slots=busy_slots,
            queued_requests=queued_requests,
            queue_limit=queue_limit,
            cached_tokens=cached_tokens,
            context_tokens=context_tokens,
            requests=self._requests,
            prompt_tokens=self._prompt,
            reused_tokens=self._reused,
            generated_tokens=self._generated,
            steps=self._steps,
            prompt_rate=self._prompt_rate,
            generation_rate=self._generation_rate,
            rows_per_step=self._rows,
            step_seconds=self._seconds,
            busy_seconds=self._busy_seconds,
            decode_seconds=self._decode_seconds,
            decodes=self._decodes,
            rounds=self._rounds,
            flushes=self._flushes,
            checkpoints=self._checkpoints,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            replayed_tokens=self._replayed,
            draft_seconds=self._draft_seconds,
        )
