"""The state of a slot as a stream of chunks: into a file, and out of one."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

from google.protobuf.duration_pb2 import Duration

from slotwire.v1 import slot_pb2 as pb
from slotwire.v1 import snapshot_pb2
from slotwire_client.errors import DataLoss, rpc_errors

CHUNK_BYTES = 256 << 10

Source = bytes | bytearray | memoryview | Path | BinaryIO
"""Where an image comes from: bytes, a file by its name, or one that is open for reading and can seek."""
OnProgress = Callable[[int, int], None]
"""Called with the bytes so far and all of them."""


class Sink(Protocol):
    """Where an image goes: a file that is open for writing bytes will do."""

    def write(self, data: bytes, /) -> object: ...


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """An image that was written. `size_bytes` is its size; `digest` was compared with what came. With `resumable` a
    generation goes with it.
    """

    size_bytes: int
    tokens: int
    manifest: bytes
    digest: str
    resumable: bool


@dataclass(frozen=True, slots=True)
class RestoredSection:
    """A part of an image (tokens, target, checkpoints, draft, manifest): used, or why not."""

    name: str
    applied: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """What became of an image. `recomputed`: the state did not fit, and its tokens were computed instead."""

    slot_id: int
    restored_tokens: int
    reusable_tokens: int
    recomputed: bool
    sections: tuple[RestoredSection, ...]
    size_bytes: int
    receive_time: timedelta
    apply_time: timedelta
    resumable: bool


@dataclass(frozen=True, slots=True)
class RestoreStatus:
    """An upload that is not done: it goes on at `committed_bytes`, and is forgotten after `expires_in`."""

    size_bytes: int
    committed_bytes: int
    expires_in: timedelta


async def receive(call: Any, sink: Sink, on_progress: OnProgress | None) -> SavedSlot:
    """Writes the image of a SaveSlot call into `sink`, and checks its digest."""
    header = trailer = None
    digest, written = hashlib.sha256(), 0
    with rpc_errors(call):
        async for message in call:
            match message.WhichOneof("part"):
                case "header":
                    header = message.header
                case "chunk":
                    if message.chunk.offset != written:
                        raise DataLoss(f"bytes came at {message.chunk.offset}, not {written}", reason="WRONG_OFFSET")
                    await asyncio.to_thread(_keep, sink, digest, message.chunk.data)
                    written += len(message.chunk.data)
                    if on_progress is not None and header is not None:
                        on_progress(written, header.size_bytes)
                case "trailer":
                    trailer = message.trailer
    if header is None or trailer is None or written != header.size_bytes:
        raise DataLoss("the stream ended before the image did", reason="STREAM_TRUNCATED")
    if trailer.digest != f"sha256:{digest.hexdigest()}":
        raise DataLoss("the image has another digest than the one that was sent", reason="DIGEST_MISMATCH")
    return SavedSlot(written, header.tokens, header.manifest, trailer.digest, header.resumable)


def _keep(sink: Sink, digest: Any, data: bytes) -> None:
    sink.write(data)
    digest.update(data)


class Outgoing:
    """An image on its way to a server. Its size is known before it is read."""

    def __init__(self, source: Source, chunk_bytes: int, on_progress: OnProgress | None) -> None:
        self._owned = isinstance(source, Path)
        if isinstance(source, Path):
            self._file: BinaryIO = source.open("rb")
        elif isinstance(source, bytes | bytearray | memoryview):
            self._file = io.BytesIO(source)
        else:
            self._file = source
        self._start = self._file.tell()
        self.size = self._file.seek(0, io.SEEK_END) - self._start
        self._chunk_bytes, self._on_progress = chunk_bytes, on_progress

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned:
            self._file.close()

    async def requests(self, header: pb.RestoreSlotHeader, offset: int = 0) -> AsyncIterator[pb.RestoreSlotRequest]:
        """The messages of a RestoreSlot call whose server has the first `offset` bytes."""
        header.size_bytes, header.digest = self.size, "sha256"
        yield pb.RestoreSlotRequest(header=header)
        digest, at = hashlib.sha256(), 0
        self._file.seek(self._start)
        while data := await asyncio.to_thread(self._next, digest, offset - at if at < offset else self._chunk_bytes):
            if at >= offset:
                yield pb.RestoreSlotRequest(chunk=pb.SlotImageChunk(offset=at, data=data))
            at += len(data)
            if self._on_progress is not None:
                self._on_progress(at, self.size)
        yield pb.RestoreSlotRequest(trailer=pb.SlotImageTrailer(digest=f"sha256:{digest.hexdigest()}"))

    def _next(self, digest: Any, most: int) -> bytes:
        data = self._file.read(min(most, self._chunk_bytes))
        digest.update(data)
        return data


def restored(message: pb.RestoreSlotResponse | snapshot_pb2.RestoreSnapshotResponse) -> RestoredSlot:
    """Of a snapshot, `receive_time` is that of reading it from the store."""
    return RestoredSlot(
        slot_id=message.slot_id,
        restored_tokens=message.restored_tokens,
        reusable_tokens=message.reusable_tokens,
        recomputed=message.recomputed,
        sections=tuple(RestoredSection(entry.name, entry.applied, entry.reason) for entry in message.sections),
        size_bytes=message.size_bytes,
        receive_time=_receive_time(message).ToTimedelta(),
        apply_time=message.apply_time.ToTimedelta(),
        resumable=message.resumable,
    )


def _receive_time(message: pb.RestoreSlotResponse | snapshot_pb2.RestoreSnapshotResponse) -> Duration:
    return message.receive_time if isinstance(message, pb.RestoreSlotResponse) else message.read_time
