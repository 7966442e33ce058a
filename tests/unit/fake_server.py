"""A Slotwire server without an engine: it answers from a script, over a real loopback connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from slotwire.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    sampling_pb2,
    slot_pb2,
    slot_pb2_grpc,
    system_pb2,
    system_pb2_grpc,
)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class FakeServer:
    """The script, and what was seen.

    Attributes:
        words: The answer to every prompt, one delta each.
        hold_after: After so many words the answer waits until it is cancelled.
        truncate: End the stream without `finished`.
        failure: Refuse every call but GetServerInfo with this code and these google.rpc details.
        chat: The model has a chat template.
        requests: The requests for a generation, in order.
        metadata: The metadata of the last call.
        holding, cancelled: Set when an answer waits, and when the server saw that it was cancelled.
    """

    words: tuple[str, ...] = ("Once", " upon", " a", " time")
    hold_after: int | None = None
    truncate: bool = False
    failure: tuple[grpc.StatusCode, tuple[Message, ...]] | None = None
    chat: bool = True
    states: list[tuple[system_pb2.ServerState.ValueType, float]] = field(
        default_factory=lambda: [(system_pb2.SERVER_STATE_READY, 1.0)]
    )
    requests: list[generation_pb2.GenerateRequest] = field(default_factory=list)
    metadata: dict[str, str | bytes] = field(default_factory=dict)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    health: health.HealthServicer = field(default_factory=health.HealthServicer)

    async def set_serving(self, serving: bool) -> None:
        """Tells those who watch the health."""
        status = health_pb2.HealthCheckResponse
        await self.health.set("", status.SERVING if serving else status.NOT_SERVING)

    async def enter(self, context: Context) -> None:
        """What every call does first: note the metadata, fail where the script says so."""
        self.metadata = dict(context.invocation_metadata() or ())
        if self.failure is not None:
            code, details = self.failure
            await context.abort(code, "it failed", trailing(code, "it failed", details))


def trailing(
    code: grpc.StatusCode, message: str, details: Iterable[Message]
) -> tuple[tuple[str, str | bytes], tuple[str, str | bytes]]:
    """The trailing metadata of a failed call."""
    packed = []
    for detail in details:
        packed.append(Packed())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    return ("grpc-status-details-bin", status.SerializeToString()), ("x-request-id", "request-7")


@asynccontextmanager
async def running(fake: FakeServer, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Runs the server and gives its address."""
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(_Generation(fake), server)
    slot_pb2_grpc.add_SlotServiceServicer_to_server(_Slots(fake), server)
    system_pb2_grpc.add_SystemServiceServicer_to_server(_System(fake), server)
    health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


class _Generation(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake

    async def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        fake = self.fake
        await fake.enter(context)
        fake.requests.append(request)
        slot = request.slot_id if request.HasField("slot_id") else 2
        seed = request.sampling.seed if request.sampling.HasField("seed") else 99
        yield _event(
            started=generation_pb2.Started(
                request_id=f"r{len(fake.requests)}", slot_id=slot, prompt_tokens=5, reused_tokens=3, seed=seed
            )
        )
        if request.progress:
            yield _event(progress=generation_pb2.Progress(processed_tokens=5, prompt_tokens=5))
        try:
            for index, word in enumerate(fake.words):
                if index == fake.hold_after:
                    fake.holding.set()
                    await asyncio.Event().wait()
                yield _event(delta=_delta(index, word, request))
        except asyncio.CancelledError:
            fake.cancelled.set()
            raise
        if not fake.truncate:
            yield _event(finished=_finished(len(fake.words), request))

    async def Tokenize(  # noqa: N802
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        await self.fake.enter(context)
        data = request.text_bytes if request.HasField("text_bytes") else request.text.encode()
        pieces = [bytes([byte]) for byte in data] if request.pieces else []
        return generation_pb2.TokenizeResponse(ids=list(data), pieces=pieces)

    async def Detokenize(  # noqa: N802
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        await self.fake.enter(context)
        data = bytes(request.ids)
        return generation_pb2.DetokenizeResponse(text=data.decode(errors="replace"), text_bytes=data)

    async def RenderChat(  # noqa: N802
        self, request: generation_pb2.RenderChatRequest, context: Context
    ) -> generation_pb2.RenderChatResponse:
        await self.fake.enter(context)
        text = "".join(f"<{message.role}>{message.content}" for message in request.chat.messages)
        return generation_pb2.RenderChatResponse(text=text, ids=list(text.encode()))


class _Slots(slot_pb2_grpc.SlotServiceServicer):
    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake
        self.slots = [
            slot_pb2.Slot(id=0, state=slot_pb2.SLOT_STATE_IDLE, context_tokens=2048),
            slot_pb2.Slot(
                id=1,
                state=slot_pb2.SLOT_STATE_GENERATING,
                cached_tokens=120,
                prompt_tokens=100,
                reused_tokens=60,
                generated_tokens=20,
                context_tokens=2048,
                session="alpha",
                request_id="r9",
            ),
        ]
        self.slots[1].last_used.FromSeconds(1_700_000_000)

    async def ListSlots(  # noqa: N802
        self, request: slot_pb2.ListSlotsRequest, context: Context
    ) -> slot_pb2.ListSlotsResponse:
        await self.fake.enter(context)
        return slot_pb2.ListSlotsResponse(slots=self.slots)

    async def GetSlot(  # noqa: N802
        self, request: slot_pb2.GetSlotRequest, context: Context
    ) -> slot_pb2.GetSlotResponse:
        await self.fake.enter(context)
        return slot_pb2.GetSlotResponse(slot=self.slots[request.id])

    async def EraseSlot(  # noqa: N802
        self, request: slot_pb2.EraseSlotRequest, context: Context
    ) -> slot_pb2.EraseSlotResponse:
        await self.fake.enter(context)
        return slot_pb2.EraseSlotResponse(erased_tokens=self.slots[request.id].cached_tokens)


class _System(system_pb2_grpc.SystemServiceServicer):
    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake

    async def GetServerInfo(  # noqa: N802
        self, request: system_pb2.GetServerInfoRequest, context: Context
    ) -> system_pb2.GetServerInfoResponse:
        states = self.fake.states
        state, progress = states.pop(0) if len(states) > 1 else states[0]
        return system_pb2.GetServerInfoResponse(version="0.1.0", state=state, load_progress=progress)

    async def GetModelInfo(  # noqa: N802
        self, request: system_pb2.GetModelInfoRequest, context: Context
    ) -> system_pb2.GetModelInfoResponse:
        await self.fake.enter(context)
        return system_pb2.GetModelInfoResponse(
            name="fake.gguf",
            slots=2,
            capabilities=system_pb2.Capabilities(trim=True, chat=self.fake.chat),
            sampling_defaults=sampling_pb2.SamplingOptions(
                temperature=0.8, top_k=40, xtc=sampling_pb2.XtcOptions(probability=0.0, threshold=0.1)
            ),
            chat_template="{{ messages }}" if self.fake.chat else "",
        )

    async def GetLoad(  # noqa: N802
        self, request: system_pb2.GetLoadRequest, context: Context
    ) -> system_pb2.GetLoadResponse:
        await self.fake.enter(context)
        load = system_pb2.GetLoadResponse(slots=2, busy_slots=1, generated_tokens_per_second=123.5)
        load.step_time.FromMilliseconds(12)
        return load


def _event(**event: Any) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(**event)


def _delta(index: int, word: str, request: generation_pb2.GenerateRequest) -> generation_pb2.Delta:
    delta = generation_pb2.Delta(text=word, token_ids=[100 + index])
    if request.HasField("logprobs"):
        entry = generation_pb2.LogprobEntry(token_id=100 + index, logprob=-0.5, piece=word.encode())
        delta.logprobs.append(generation_pb2.TokenLogprob(token=entry, top=[entry] * request.logprobs))
    return delta


def _finished(words: int, request: generation_pb2.GenerateRequest) -> generation_pb2.Finished:
    finished = generation_pb2.Finished(
        reason=generation_pb2.FINISH_REASON_STOP,
        stop="!",
        usage=generation_pb2.Usage(prompt_tokens=5, reused_tokens=3, generated_tokens=words),
    )
    if request.timings:
        finished.timings.queue.FromMilliseconds(1)
        finished.timings.prompt.FromMilliseconds(20)
        finished.timings.generation.FromMilliseconds(300)
    return finished
