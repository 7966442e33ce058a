"""Snapshots: slot images by name, in the server's own store."""

# A `timeout` here is the deadline that gRPC sends to the server, so that both sides stop; asyncio.timeout would not.
# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from slotwire.v1 import snapshot_pb2 as pb
from slotwire.v1 import snapshot_pb2_grpc as pb_grpc
from slotwire_client.state import RestoredSlot, restored


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot, without its data. `model` tells people what it is the state of."""

    name: str
    size_bytes: int
    created_at: datetime
    digest: str
    tokens: int
    model: str
    metadata: Mapping[str, str]


class Snapshots:
    """The snapshots of a server; `Client.snapshots` is one. Every call takes a `timeout` in seconds."""

    def __init__(self, stub: pb_grpc.SnapshotServiceAsyncStub, call: Callable[..., Awaitable[Any]]) -> None:
        self._stub, self._call = stub, call

    async def save(
        self,
        name: str,
        slot_id: int,
        *,
        overwrite: bool = False,
        draft: bool | None = None,
        metadata: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Snapshot:
        """Keeps the state of a slot, busy or not. Raises FailedPrecondition where there is such a snapshot and
        `overwrite` is not set, NotFound (slot) and ResourceExhausted (the store is full).
        """
        request = pb.SaveSnapshotRequest(
            name=name, slot_id=slot_id, overwrite=overwrite, draft=draft, metadata=metadata or {}
        )
        return _snapshot((await self._call(self._stub.SaveSnapshot, request, timeout)).snapshot)

    async def restore(
        self,
        name: str,
        *,
        slot_id: int | None = None,
        session: str | None = None,
        cache_key: str | None = None,
        recompute: bool = False,
        timeout: float | None = None,
    ) -> RestoredSlot:
        """Puts a snapshot into an idle slot, `slot_id` or one that the server chooses. Raises NotFound,
        FailedPrecondition (slot busy, another model or context) and DataLoss (damaged).
        """
        request = pb.RestoreSnapshotRequest(
            name=name, slot_id=slot_id, session=session, cache_key=cache_key, recompute=recompute
        )
        return restored(await self._call(self._stub.RestoreSnapshot, request, timeout))

    async def list(self, prefix: str = "", *, timeout: float | None = None) -> AsyncIterator[Snapshot]:
        """All snapshots whose names begin with `prefix`, by name; fetched page by page."""
        token = ""
        while True:
            request = pb.ListSnapshotsRequest(prefix=prefix, page_token=token)
            page = await self._call(self._stub.ListSnapshots, request, timeout)
            for message in page.snapshots:
                yield _snapshot(message)
            token = page.next_page_token
            if not token:
                return

    async def get(self, name: str, *, timeout: float | None = None) -> Snapshot:
        """Raises NotFound."""
        return _snapshot((await self._call(self._stub.GetSnapshot, pb.GetSnapshotRequest(name=name), timeout)).snapshot)

    async def delete(self, name: str, *, timeout: float | None = None) -> None:
        """Raises NotFound."""
        await self._call(self._stub.DeleteSnapshot, pb.DeleteSnapshotRequest(name=name), timeout)


def _snapshot(message: pb.Snapshot) -> Snapshot:
    return Snapshot(
        name=message.name,
        size_bytes=message.size_bytes,
        created_at=message.created_at.ToDatetime(tzinfo=UTC),
        digest=message.digest,
        tokens=message.tokens,
        model=message.model,
        metadata=dict(message.metadata),
    )
