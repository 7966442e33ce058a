"""SnapshotService."""

from __future__ import annotations

from typing import Any

import grpc

from service.rpc import wire
from service.rpc.states import read_destination, write_sections
from service.snapshots import Snapshots
from service.state.snapshot import SnapshotInfo
from slotwire.v1 import snapshot_pb2 as pb
from slotwire.v1 import snapshot_pb2_grpc as pb_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class SnapshotServicer(pb_grpc.SnapshotServiceServicer):
    """Slot images by name."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    async def SaveSnapshot(self, request: pb.SaveSnapshotRequest, context: _Context) -> pb.SaveSnapshotResponse:
        info, resumable = await self._snapshots.save(
            request.name,
            request.slot_id,
            overwrite=request.overwrite,
            with_draft=not request.HasField("draft") or request.draft,
            metadata=dict(request.metadata),
        )
        return pb.SaveSnapshotResponse(snapshot=_write(info), resumable=resumable)

    async def RestoreSnapshot(
        self, request: pb.RestoreSnapshotRequest, context: _Context
    ) -> pb.RestoreSnapshotResponse:
        read = await self._snapshots.restore(request.name, read_destination(request))
        restored = read.restored
        return pb.RestoreSnapshotResponse(
            slot_id=restored.slot_id,
            restored_tokens=restored.tokens,
            reusable_tokens=restored.tokens,
            recomputed=restored.recomputed,
            sections=write_sections(restored),
            size_bytes=read.info.bytes,
            read_time=wire.duration(read.seconds),
            apply_time=wire.duration(restored.seconds),
            resumable=restored.resumable,
        )

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: _Context) -> pb.ListSnapshotsResponse:
        page = await self._snapshots.list(request.prefix, request.page_size, request.page_token)
        return pb.ListSnapshotsResponse(snapshots=map(_write, page.snapshots), next_page_token=page.next_token)

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: _Context) -> pb.GetSnapshotResponse:
        return pb.GetSnapshotResponse(snapshot=_write(await self._snapshots.info(request.name)))

    async def DeleteSnapshot(self, request: pb.DeleteSnapshotRequest, context: _Context) -> pb.DeleteSnapshotResponse:
        await self._snapshots.delete(request.name)
        return pb.DeleteSnapshotResponse()


def _write(info: SnapshotInfo) -> pb.Snapshot:
    return pb.Snapshot(
        name=info.name,
        size_bytes=info.bytes,
        created_at=wire.timestamp(info.created),
        digest=info.digest,
        tokens=info.tokens,
        model=info.model,
        metadata=info.metadata,
    )
