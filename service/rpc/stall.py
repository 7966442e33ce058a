"""Notices that a client no longer reads: one timer for a stream, instead of one for each of its messages."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from service.engine.outbox import too_slow


class StallWatch:
    """A context manager around a handler that writes: a write that is pending for `seconds` ends it with Exhausted.

    Between `writing()` and `written()` the clock runs. Nothing is scheduled for a write that goes through, since an
    asyncio.timeout for each would cost a fourth of what a message costs.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._expired and kind is asyncio.CancelledError and self._task.uncancel() == 0:
            raise too_slow(f"nothing was read for {self._seconds:g} s")

    def writing(self) -> None:
        self._since = self._loop.time()

    def written(self) -> None:
        self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._seconds
        if due <= now:
            self._expired = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(due, self._look)
