"""GenerationService."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from service.backend import Backend
from service.engine.chat import text_of
from service.engine.types import Event, Finished
from service.rpc import wire
from service.rpc.fields import Fields
from service.rpc.interceptor import REQUEST_ID_KEY, request_id
from service.rpc.stall import StallWatch
from slotwire.v1 import generation_pb2 as pb
from slotwire.v1 import generation_pb2_grpc as pb_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Streams generations. `write_seconds` is how long a client may leave a message unread."""

    def __init__(self, backend: Backend, write_seconds: float) -> None:
        self._backend = backend
        self._write_seconds = write_seconds

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:  # type: ignore[override]
        now, remaining = time.monotonic(), context.time_remaining()
        rid = request_id(context)
        context.set_trailing_metadata(((REQUEST_ID_KEY, rid),))
        deadline = None if remaining is None else now + remaining
        pieces = self._backend.loaded.runner.pieces
        try:
            if request.resume:
                running, outbox = await self._backend.resume(wire.read_resume(request, rid, now, deadline))
            else:
                running, outbox = await self._backend.submit(wire.read_generate(request, rid, now, deadline))
            with StallWatch(self._write_seconds) as watch:
                event: Event | None = None
                while not isinstance(event, Finished):
                    event = await outbox.get()
                    message = wire.write_event(event, running, pieces, timings=request.timings)
                    watch.writing()
                    await context.write(message)
                    watch.written()
        finally:
            self._backend.cancel(rid)

    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        text = wire.read_text(request)
        vocabulary = self._backend.loaded.runner.vocabulary
        tokens = await asyncio.to_thread(
            vocabulary.tokenize, text, add_special=request.add_special, parse_special=request.parse_special
        )
        pieces = [vocabulary.detokenize([token], special=True) for token in tokens] if request.pieces else ()
        return pb.TokenizeResponse(ids=tokens, pieces=pieces)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        vocabulary = self._backend.loaded.runner.vocabulary
        vocabulary.check("ids", request.ids)
        data = vocabulary.detokenize(request.ids, special=request.special)
        return pb.DetokenizeResponse(text=data.decode("utf-8", "replace"), text_bytes=data)

    async def RenderChat(self, request: pb.RenderChatRequest, context: _Context) -> pb.RenderChatResponse:
        fields = Fields()
        prompt = wire.read_chat(request.chat, fields)
        fields.check()
        intake = self._backend.loaded.intake
        segments = await asyncio.to_thread(intake.render, prompt)
        ids = await asyncio.to_thread(intake.tokenize_segments, segments)
        return pb.RenderChatResponse(text=text_of(segments), ids=ids)
