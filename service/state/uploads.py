"""The uploads that are not done yet, within limits. Knows no stream and no thread, and time comes from a clock.

An upload counts with all the bytes that it announced, so that one that was let in has room to its end.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.errors import Conflict, Exhausted, FieldViolation, InvalidRequest
from service.state.integrity import BLAKE3, Digest
from service.state.reader import ImageReader
from service.state.upload import RETRY_AFTER, Upload, unknown_upload

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class UploadStatus:
    """`size` and `committed` are bytes: all, and those that need not be sent again. `digest` is its algorithm.

    `in_use`: a stream has it. `expires_at` is a time of the clock, unless the upload is used before.
    """

    id: str
    size: int
    committed: int
    digest: str
    in_use: bool
    expires_at: float


@dataclass(frozen=True, slots=True)
class UploadUsage:
    """What is in flight. `reserved_bytes` are those announced, `committed_bytes` those that came."""

    uploads: int
    reserved_bytes: int
    committed_bytes: int


class Uploads:
    """`max_bytes` is for all uploads together, `time_to_live` in seconds since one was used last. `reader` makes the
    reader of an upload, which knows what the image is for.
    """

    def __init__(
        self,
        *,
        max_uploads: int,
        max_bytes: int,
        time_to_live: float,
        clock: Callable[[], float] = time.monotonic,
        reader: Callable[[], ImageReader] = ImageReader,
    ) -> None:
        self._max_uploads = max_uploads
        self._max_bytes = max_bytes
        self._time_to_live = time_to_live
        self._clock = clock
        self._reader = reader
        self._uploads: dict[str, Upload] = {}

    def begin(
        self, upload_id: str | None, size: int, digest: str = BLAKE3, reader: ImageReader | None = None
    ) -> Upload:
        """The upload of that id, a new one where there is none; None makes an id that nobody can guess. `reader` is for
        a new one, where it needs another than the usual.

        `size` is that of the image in bytes, `digest` the algorithm of the digest that will be given at its end. Raises
        InvalidRequest for a bad value, Conflict where the id belongs to an upload of another size or algorithm, and
        Exhausted where there is no room.
        """
        self.expire()
        upload_id = secrets.token_hex(16) if upload_id is None else _checked(upload_id)
        upload = self._uploads.get(upload_id)
        if upload is None:
            return self._new(upload_id, size, Digest(digest), reader or self._reader())
        if (upload.size, upload.digest) != (size, digest):
            message = f"upload {upload_id} has {upload.size} bytes and a {upload.digest} digest"
            raise Conflict(message, reason="UPLOAD_DIFFERS", upload_id=upload_id)
        return upload

    def status(self, upload_id: str) -> UploadStatus:
        """Raises NotFound, or InvalidRequest where it can be no id."""
        upload = self._known(upload_id)
        return UploadStatus(
            id=upload.id,
            size=upload.size,
            committed=upload.committed,
            digest=upload.digest,
            in_use=upload.in_use,
            expires_at=self._expiry(upload),
        )

    def drop(self, upload_id: str) -> None:
        """Forgets an upload, also one that a stream uses, which then gets NotFound. Raises as `status` does, and
        Conflict for one that is finished, whose image is being used.
        """
        upload = self._known(upload_id)
        if upload.finished:
            raise Conflict(f"upload {upload_id} is finished", reason="UPLOAD_BUSY", upload_id=upload_id)
        self._forget(upload)

    def discard(self, upload: Upload) -> None:
        """Forgets an upload that nobody can go on with. Once is enough."""
        self._forget(upload)

    def expire(self) -> tuple[str, ...]:
        """Forgets those that were not used for too long, also one whose stream stalls, and returns their ids."""
        now = self._clock()
        late = [upload for upload in self._unfinished() if self._expiry(upload) <= now]
        for upload in late:
            self._forget(upload)
        return tuple(upload.id for upload in late)

    @property
    def next_expiry(self) -> float | None:
        """The time of the clock before which `expire` has nothing to do; None without uploads."""
        return min(map(self._expiry, self._unfinished()), default=None)

    @property
    def usage(self) -> UploadUsage:
        uploads = self._uploads.values()
        return UploadUsage(len(uploads), sum(u.size for u in uploads), sum(u.committed for u in uploads))

    def _new(self, upload_id: str, size: int, digest: Digest, reader: ImageReader) -> Upload:
        if size < 1:
            raise InvalidRequest(FieldViolation("size", "must be at least 1 byte"))
        self._check_room(size)
        upload = Upload(upload_id, size, digest=digest, reader=reader, clock=self._clock, forget=self._forget)
        self._uploads[upload_id] = upload
        return upload

    def _check_room(self, size: int) -> None:
        if size > self._max_bytes:
            message = f"an upload of {size} bytes; the limit is {self._max_bytes}"
            raise Exhausted(message, reason="UPLOAD_TOO_LARGE", limit=self._max_bytes)
        usage = self.usage
        if usage.uploads >= self._max_uploads:
            message = f"{usage.uploads} uploads are not done; the limit is {self._max_uploads}"
            raise Exhausted(message, reason="UPLOADS_FULL", retry_after=RETRY_AFTER)
        if usage.reserved_bytes + size > self._max_bytes:
            message = f"uploads have {usage.reserved_bytes} bytes; with {size} more they exceed {self._max_bytes}"
            raise Exhausted(message, reason="UPLOADS_FULL", retry_after=RETRY_AFTER)

    def _forget(self, upload: Upload) -> None:
        """Once is enough; and another upload may have the id by now."""
        upload.close()
        if self._uploads.get(upload.id) is upload:
            del self._uploads[upload.id]

    def _expiry(self, upload: Upload) -> float:
        return upload.touched + self._time_to_live

    def _unfinished(self) -> list[Upload]:
        return [upload for upload in self._uploads.values() if not upload.finished]

    def _known(self, upload_id: str) -> Upload:
        upload = self._uploads.get(_checked(upload_id))
        if upload is None:
            raise unknown_upload(upload_id)
        return upload


def _checked(upload_id: str) -> str:
    if not _ID.fullmatch(upload_id):
        raise InvalidRequest(FieldViolation("upload_id", "must be 1 to 128 of A-Z, a-z, 0-9, '.', '_' and '-'"))
    return upload_id
