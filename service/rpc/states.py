"""The streams of SlotService: an image out, chunk by chunk, and an image in."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from service.errors import FieldViolation, InvalidRequest
from service.rpc import wire
from service.rpc.fields import Fields
from service.rpc.interceptor import Refused
from service.rpc.stall import StallWatch
from service.slot_images import Destination, Restored, SavedImage, SlotImages
from service.state.integrity import BLAKE3, Chunk, Digest, chunks
from service.state.layout import LIMITS
from service.state.received import Completed
from service.state.upload import Upload
from service.state.uploads import Uploads
from slotwire.v1 import slot_pb2 as pb
from slotwire.v1 import snapshot_pb2

Context = grpc.aio.ServicerContext[Any, Any]

CHUNK_BYTES = 256 << 10
LEAST_CHUNK, LARGEST_CHUNK = 4 << 10, 4 << 20
MAX_LABEL_BYTES = 256
_AHEAD_BYTES = 4 << 20
"""What is cut and hashed on a thread while the bytes before are being sent."""


class StateStreams:
    """Sends and receives images. `write_seconds` is how long a client may leave a message unread."""

    def __init__(self, images: SlotImages, uploads: Uploads, write_seconds: float) -> None:
        self._images, self._uploads, self._write_seconds = images, uploads, write_seconds
        self._thread = ThreadPoolExecutor(1, "slotwire-state")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def save(self, request: pb.SaveSlotRequest, context: Context) -> None:
        fields = Fields()
        size = fields.integer(request, "chunk_bytes", CHUNK_BYTES, LEAST_CHUNK, LARGEST_CHUNK)
        fields.check()
        digest = Digest(request.digest if request.HasField("digest") else BLAKE3)
        image = await self._images.save(request.slot_id, with_draft=not request.HasField("draft") or request.draft)
        header = pb.SlotImageHeader(
            size_bytes=image.size, tokens=image.tokens, manifest=image.manifest, resumable=image.resumable
        )
        with StallWatch(self._write_seconds) as watch:
            await self._write(context, watch, pb.SaveSlotResponse(header=header))
            async for message in self._cut(image, size, digest):
                await self._write(context, watch, message)
            trailer = pb.SlotImageTrailer(digest=digest.text())
            await self._write(context, watch, pb.SaveSlotResponse(trailer=trailer))

    async def restore(self, requests: AsyncIterator[Any], context: Context) -> pb.RestoreSlotResponse:
        began = time.monotonic()
        header = _part(await anext(aiter(requests), None), "header")
        destination, digest = _read_header(header), header.digest if header.HasField("digest") else BLAKE3
        if destination.slot_id is not None:
            await self._images.check_idle(destination.slot_id)
        if header.HasField("manifest"):
            await self._images.check_manifest(header.manifest, destination)
        upload_id = header.upload_id if header.HasField("upload_id") else None
        reader = self._images.reader(any_kind=destination.recompute)
        upload = self._uploads.begin(upload_id, header.size_bytes, digest, reader)
        try:
            with upload.attached():
                completed = await self._receive(upload, requests)
                received = time.monotonic()
                restored = await self._images.restore(completed, destination)
                return _write_restored(restored, upload.size, received - began)
        finally:
            if upload_id is None:  # nobody knows its id
                self._uploads.discard(upload)

    def status(self, request: pb.GetRestoreStatusRequest) -> pb.GetRestoreStatusResponse:
        status = self._uploads.status(request.upload_id)
        return pb.GetRestoreStatusResponse(
            size_bytes=status.size,
            committed_bytes=status.committed,
            expires_in=wire.duration(max(status.expires_at - time.monotonic(), 0.0)),
        )

    async def _write(self, context: Context, watch: StallWatch, message: pb.SaveSlotResponse) -> None:
        watch.writing()
        await context.write(message)
        watch.written()

    async def _cut(self, image: SavedImage, size: int, digest: Digest) -> AsyncIterator[pb.SaveSlotResponse]:
        """The messages of an image; some are made on a thread while those before are sent."""
        loop, source = asyncio.get_running_loop(), chunks(image.pieces, size)
        count = max(1, _AHEAD_BYTES // size)
        ahead = loop.run_in_executor(self._thread, _messages, source, count, digest)
        while messages := await ahead:
            ahead = loop.run_in_executor(self._thread, _messages, source, count, digest)
            for message in messages:
                yield message

    async def _receive(self, upload: Upload, requests: AsyncIterator[Any]) -> Completed:
        """All chunks; one is checked on a thread while the next one comes."""
        loop = asyncio.get_running_loop()
        taking: asyncio.Future[int] | None = None
        try:
            async for message in requests:
                part = _part(message, "chunk", "trailer")
                if taking is not None:
                    await taking
                    taking = None
                if isinstance(part, pb.SlotImageTrailer):
                    return await loop.run_in_executor(self._thread, upload.finish, part.digest)
                chunk = Chunk(part.offset, part.data, part.crc32c if part.HasField("crc32c") else None)
                taking = loop.run_in_executor(self._thread, upload.take, chunk)
            if taking is not None:
                await taking
                taking = None
            raise InvalidRequest(FieldViolation("trailer", "is missing"), reason="STREAM_INCOMPLETE")
        finally:
            if taking is not None:  # the upload is in use until that is over
                await asyncio.wait([taking])


def _messages(source: Iterator[Chunk], count: int, digest: Digest) -> list[pb.SaveSlotResponse]:
    found = []
    for chunk in itertools.islice(source, count):
        digest.update(chunk.data)
        data = bytes(chunk.data)
        found.append(pb.SaveSlotResponse(chunk=pb.SlotImageChunk(offset=chunk.offset, data=data, crc32c=chunk.crc32c)))
    return found


def _part(message: Any, *kinds: str) -> Any:
    """What is in a message of the stream, if it is of one of these kinds."""
    if isinstance(message, Refused):
        raise message.error
    found = message.WhichOneof("part") if message is not None else None
    if found not in kinds:
        expected = " or ".join(kinds)
        raise InvalidRequest(FieldViolation(found or "part", f"comes where {expected} is expected"))
    return getattr(message, found)


def _read_header(header: pb.RestoreSlotHeader) -> Destination:
    if not 1 <= header.size_bytes <= LIMITS.state_bytes:
        violation = FieldViolation("header.size_bytes", f"{header.size_bytes} is not in [1, {LIMITS.state_bytes}]")
        raise InvalidRequest(violation)
    return read_destination(header)


def read_destination(message: pb.RestoreSlotHeader | snapshot_pb2.RestoreSnapshotRequest) -> Destination:
    """Where an image goes. Raises InvalidRequest."""
    fields = Fields()
    destination = Destination(
        slot_id=message.slot_id if message.HasField("slot_id") else None,
        session=fields.label(message, "session", MAX_LABEL_BYTES),
        cache_key=fields.label(message, "cache_key", MAX_LABEL_BYTES) or "",
        recompute=message.recompute,
    )
    fields.check()
    return destination


def write_sections(restored: Restored) -> list[pb.RestoredSection]:
    """What was used of an image, and what was not."""
    sections = [pb.RestoredSection(name=section.value, applied=True) for section in restored.applied]
    return sections + [pb.RestoredSection(name=section.value, reason=why) for section, why in restored.dropped.items()]


def _write_restored(restored: Restored, size: int, receive_seconds: float) -> pb.RestoreSlotResponse:
    return pb.RestoreSlotResponse(
        slot_id=restored.slot_id,
        restored_tokens=restored.tokens,
        reusable_tokens=restored.tokens,
        recomputed=restored.recomputed,
        sections=write_sections(restored),
        size_bytes=size,
        receive_time=wire.duration(receive_seconds),
        apply_time=wire.duration(restored.seconds),
        resumable=restored.resumable,
    )
