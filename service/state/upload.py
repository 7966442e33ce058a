"""One image that comes in chunks, and may come in several streams: one breaks off, the next goes on where it ended."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from service.errors import Conflict, Exhausted, FieldViolation, InvalidRequest, NotFound, OutOfRange
from service.state.integrity import Chunk, Digest
from service.state.reader import ImageReader
from service.state.received import Completed, Places

RETRY_AFTER = 1.0
_HUGE_PAGE = 2 << 20


@dataclass(slots=True)
class _Arrival:
    """What came of an image: its bytes, and what was read in them."""

    buffer: memoryview
    places: Places
    reader: ImageReader
    digest: Digest


class Upload:
    """One image on its way. `size` is in bytes, `committed` how many of them came, `digest` the algorithm of the digest
    that `finish` will be given. `touched` is when it was used last, by `clock`.

    It is forgotten with its bytes when what came is no image, and when its digest is not the one expected; then
    `forget` is called. All other errors change nothing: the caller may go on from `committed`.

    Raises Exhausted where there is no memory for it. That is taken page by page as bytes come.
    """

    def __init__(
        self,
        upload_id: str,
        size: int,
        *,
        digest: Digest,
        reader: ImageReader,
        clock: Callable[[], float],
        forget: Callable[[Upload], None],
    ) -> None:
        buffer = _reserved(size)
        self.id = upload_id
        self.size = size
        self.committed = 0
        self.digest = digest.name
        self.touched = clock()
        self.in_use = False
        self.finished = False
        self._clock = clock
        self._forget = forget
        self._arrival: _Arrival | None = _Arrival(buffer, Places(buffer=buffer), reader, digest)

    @contextlib.contextmanager
    def attached(self) -> Iterator[Upload]:
        """For one stream at a time, which alone may use `take` and `finish`. A finished upload is forgotten when this
        ends, and counts until then.

        Raises Conflict while another stream has it, and NotFound once it is gone.
        """
        if self.in_use:
            raise Conflict(f"upload {self.id} is in use", reason="UPLOAD_BUSY", upload_id=self.id)
        if self._arrival is None:
            raise unknown_upload(self.id)
        self.in_use = True
        self._touch()
        try:
            yield self
        finally:
            self.in_use = False
            self._touch()
            if self.finished:
                self._forget(self)

    def take(self, chunk: Chunk) -> int:
        """Commits the next chunk, and returns how many bytes are committed with it.

        Raises OutOfRange for one that does not begin where the last one ended, or goes on behind the end, DataLoss for
        a damaged one, InvalidRequest for an empty one, ImageError, and NotFound once the upload is gone.
        """
        arrival = self._usable()
        data = memoryview(chunk.data).cast("B")
        end = self._end(chunk.offset, len(data))
        chunk.check()
        with self._lost_on_error():
            arrival.buffer[self.committed : end] = data
            arrival.digest.update(data)
            # Not the copy in the buffer: a reader that is thrown away keeps the last bytes until garbage is collected.
            arrival.places.add(arrival.reader.feed(data))
        self.committed = end
        self._touch()
        return end

    def finish(self, digest: str) -> Completed:
        """The image, now that it is whole. `digest` is the text of what the sender computed.

        Raises OutOfRange where bytes are missing, InvalidRequest for a text that is no digest of the algorithm,
        DataLoss where it is another one than that of the bytes, ImageError, and NotFound once the upload is gone.
        """
        arrival = self._usable()
        if self.committed < self.size:
            message = f"upload {self.id} has {self.committed} of {self.size} bytes"
            raise OutOfRange(message, reason="UPLOAD_INCOMPLETE", committed=self.committed)
        arrival.digest.check_name(digest)
        with self._lost_on_error():
            arrival.digest.check(digest)
            arrival.places.add(arrival.reader.finish())
            completed = arrival.places.result(arrival.digest.text())
        self.finished, self._arrival = True, None
        return completed

    def close(self) -> None:
        """Lets go of the bytes. What is called later raises NotFound."""
        self._arrival = None

    def _touch(self) -> None:
        self.touched = self._clock()

    def _usable(self) -> _Arrival:
        if not self.in_use:
            raise RuntimeError(f"upload {self.id} is not attached")
        if self._arrival is None:
            raise unknown_upload(self.id)
        return self._arrival

    def _end(self, offset: int, length: int) -> int:
        """Where a chunk ends that is the next."""
        if not length:
            raise InvalidRequest(FieldViolation("chunk", "must have at least 1 byte"))
        if offset != self.committed:
            message = f"the chunk begins at {offset}; upload {self.id} goes on at {self.committed}"
            raise OutOfRange(message, reason="WRONG_OFFSET", committed=self.committed)
        if length > self.size - offset:
            message = f"{length} bytes at {offset} go beyond the {self.size} bytes of upload {self.id}"
            raise OutOfRange(message, reason="UPLOAD_TOO_LONG", committed=self.committed)
        return offset + length

    @contextlib.contextmanager
    def _lost_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._forget(self)
            raise


def unknown_upload(upload_id: str) -> NotFound:
    message = f"there is no upload {upload_id}: it is done, was dropped, or has expired"
    return NotFound(message, reason="UPLOAD_NOT_FOUND", upload_id=upload_id)


def _reserved(size: int) -> memoryview:
    """A writable buffer that takes memory when its pages are written. Raises Exhausted."""
    try:
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise Exhausted(f"no memory for {size} bytes: {error}", reason="NO_MEMORY", retry_after=RETRY_AFTER) from None
    if size >= 2 * _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # they fill twice as fast, and are freed in a tenth of the time
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(buffer)
