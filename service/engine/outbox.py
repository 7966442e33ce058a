"""What a request's reader has not taken yet. Lives on the event loop; the engine only ever appends."""

from __future__ import annotations

import asyncio
from collections import deque

from service.engine.types import Delta, Event
from service.errors import Exhausted, SlotwireError


class Outbox:
    """Events from the engine to one reader. A slow reader gets its deltas merged; one beyond `limit` tokens is cut off.

    Not thread-safe: both ends belong to the event loop.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[Event] = deque()
        self._tokens = 0
        self._error: SlotwireError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event | SlotwireError) -> bool:
        """Append an event, or the error that ends the stream. Returns False where the reader was cut off for being
        too slow; nothing more needs to be put then.
        """
        if isinstance(event, SlotwireError):
            self._error = event
        else:
            self._events.append(event)
            if isinstance(event, Delta):
                self._tokens += len(event.tokens)
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None
        if self._tokens <= self._limit:
            return True
        self._events.clear()
        self._error = too_slow(f"{self._tokens} tokens were waiting to be read; the limit is {self._limit}")
        return False

    async def get(self) -> Event:
        """The next event; waits for one. Raises the error that ended the stream, after all events before it."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event = self._events.popleft()
        if not isinstance(event, Delta):
            return event
        if self._events and isinstance(self._events[0], Delta):
            event = self._merge(event)
        self._tokens -= len(event.tokens)
        return event

    def _merge(self, first: Delta) -> Delta:
        deltas = [first]
        while self._events and isinstance(self._events[0], Delta):
            deltas.append(self._events.popleft())  # type: ignore[arg-type]  # looked at above
        return Delta(
            text="".join(delta.text for delta in deltas),
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        )


def too_slow(message: str) -> Exhausted:
    """The error of a reader that does not keep up."""
    return Exhausted(f"the stream is read too slowly: {message}", reason="SLOW_READER")
