"""SlotService."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from service.backend import Backend
from service.rpc import wire
from service.rpc.states import StateStreams
from slotwire.v1 import slot_pb2 as pb
from slotwire.v1 import slot_pb2_grpc as pb_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class SlotServicer(pb_grpc.SlotServiceServicer):
    """Shows slots as they are between two steps, empties idle ones, and lets their states out and in."""

    def __init__(self, backend: Backend, streams: StateStreams) -> None:
        self._backend, self._streams = backend, streams

    async def ListSlots(self, request: pb.ListSlotsRequest, context: _Context) -> pb.ListSlotsResponse:
        return pb.ListSlotsResponse(slots=[wire.write_slot(slot) for slot in await self._backend.slots()])

    async def GetSlot(self, request: pb.GetSlotRequest, context: _Context) -> pb.GetSlotResponse:
        self._backend.check_slot(request.id)
        return pb.GetSlotResponse(slot=wire.write_slot((await self._backend.slots())[request.id]))

    async def EraseSlot(self, request: pb.EraseSlotRequest, context: _Context) -> pb.EraseSlotResponse:
        return pb.EraseSlotResponse(erased_tokens=await self._backend.erase(request.id))

    async def SaveSlot(self, request: pb.SaveSlotRequest, context: _Context) -> None:  # type: ignore[override]
        await self._streams.save(request, context)

    async def RestoreSlot(
        self, requests: AsyncIterator[pb.RestoreSlotRequest], context: _Context
    ) -> pb.RestoreSlotResponse:
        return await self._streams.restore(requests, context)

    async def GetRestoreStatus(
        self, request: pb.GetRestoreStatusRequest, context: _Context
    ) -> pb.GetRestoreStatusResponse:
        return self._streams.status(request)
