"""One running generation: its text, its events, its result."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

import grpc

from slotwire.v1 import generation_pb2
from slotwire_client import decode
from slotwire_client.errors import DataLoss, rpc_errors
from slotwire_client.types import Delta, Event, Finished, GenerationResult, Started, TokenLogprob

_Call = grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]


class Generation:
    """Text as it is written. The request is on its way when this object exists.

    Iterate over it for pieces of text, over `events()` for everything, or call `complete()` for the whole. One reader
    at a time; a second iteration goes on where the first one stopped. Use it as a context manager so that leaving
    early stops the server's work at once; a task that is cancelled while it reads stops it, too.

    All ways of reading raise a SlotwireError where the server ends the stream with one, `Cancelled` after `cancel()`.
    """

    def __init__(self, call: _Call, on_result: Callable[[GenerationResult], None] | None = None) -> None:
        self._call = call
        self._on_result = on_result
        self._started: Started | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._result: GenerationResult | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while (event := await self._next()) is not None:
            if isinstance(event, Delta) and event.text:
                return event.text
        raise StopAsyncIteration

    async def events(self) -> AsyncIterator[Event]:
        """Everything that the server tells, in order."""
        while (event := await self._next()) is not None:
            yield event

    async def complete(self) -> GenerationResult:
        """Reads what is left and returns the result."""
        while await self._next() is not None:
            pass
        return self.result

    @property
    def started(self) -> Started | None:
        """The slot, seed and request id; None until the request has a slot."""
        return self._started

    @property
    def text(self) -> str:
        """The text so far, also after an early end."""
        return "".join(self._text)

    @property
    def finished(self) -> bool:
        """True once the stream was read to its regular end, so that there is a result."""
        return self._result is not None

    @property
    def result(self) -> GenerationResult:
        """All of it. Raises RuntimeError before the stream was read to its end."""
        if self._result is None:
            raise RuntimeError("there is no result before the stream was read to its end")
        return self._result

    def cancel(self) -> None:
        """Stops the generation. Does nothing once it has ended."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _next(self) -> Event | None:
        """The next event; None after the last one."""
        while self._result is None:
            message = await self._read()
            if message is None:
                raise DataLoss("the stream ended without its last event", reason="STREAM_TRUNCATED")
            event = decode.event(message)
            if isinstance(event, Finished):
                # Taking the status, too, tells gRPC that the call is over; dropping the call would cancel it.
                await self._read()
            if event is not None:
                self._keep(event)
                return event
        return None

    async def _read(self) -> generation_pb2.GenerateResponse | None:
        """The next message; None where the stream ended without an error."""
        with rpc_errors(self._call):
            message = await self._call.read()
        return message if isinstance(message, generation_pb2.GenerateResponse) else None

    def _keep(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case Delta():
                self._text.append(event.text)
                self._token_ids += event.token_ids
                self._logprobs += event.logprobs
            case Finished():
                self._finish(event)

    def _finish(self, event: Finished) -> None:
        started = self._started or Started("", 0, event.usage.prompt_tokens, event.usage.reused_tokens, 0)
        self._result = GenerationResult(
            text=self.text,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            reason=event.reason,
            stop=event.stop,
            usage=event.usage,
            timings=event.timings,
            speculation=event.speculation,
            request_id=started.request_id,
            slot_id=started.slot_id,
            seed=started.seed,
        )
        if self._on_result is not None:
            self._on_result(self._result)
