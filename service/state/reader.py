"""Reads a slot image that comes in pieces of any size. Does no I/O, and keeps nothing but the token list.

Blobs go through as views of what was fed. Lengths and counts are checked before anything is kept for them, and so are
the payloads for llama.cpp, field by field, while they go through.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable

from service.state.errors import ImageError, ManifestError, PayloadError
from service.state.layout import (
    BLOB_MAGIC,
    BLOB_PREFIX,
    IMAGE_MAGIC,
    LIMITS,
    SECTION_VERSION,
    SECTIONS,
    STATE_VERSIONS,
    Limits,
    Section,
)
from service.state.manifest import Manifest, decode
from service.state.memory import MemoryKind
from service.state.parts import (
    TARGET,
    Blob,
    BlobEnd,
    CheckpointHead,
    Dropped,
    Header,
    Part,
    Piece,
    Role,
    SectionEnd,
    Unknown,
)
from service.state.payload import PayloadWalker
from service.state.sections import CHECKPOINT, COUNT, LENGTH
from service.state.source import Ended, Source
from service.state.tokens import PACKED_WORDS, unpack

IMAGE_HEAD = struct.Struct("<III")
_PREFIX = struct.Struct("<Ii")
_MAGIC_BYTES = 4

Steps = Generator[Part | None, None, None]
"""Yields parts, and None when it needs more bytes."""


class _Broken(Exception):
    """Where a section ends cannot be told."""


class ImageReader:
    """Takes the bytes of an image and returns its parts, each as soon as it is known.

    `target` and `draft` are the kinds of memory that the states are for; None: whichever fits. `layers` is the number
    of layers of the target model, where known.

    `feed` and `finish` raise ImageError for what makes the image useless; the reader then is of no use either. Damage
    behind the target state is a `Dropped` part instead.
    """

    def __init__(
        self,
        *,
        target: MemoryKind | None = None,
        draft: MemoryKind | None = None,
        layers: int | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self._kinds = {Role.TARGET: target, Role.DRAFT: draft}
        self._layers = {Role.TARGET: layers, Role.DRAFT: None}
        self._limits = limits
        self._source = Source()
        self._version = 0
        self._tokens = 0
        self._damage: str | None = None  # of the section at hand, which nevertheless can be read to its end
        self._steps = self._image()

    def feed(self, data: bytes | memoryview) -> list[Part]:
        """The parts that `data` completes. Pieces are views of it."""
        self._source.add(memoryview(data).cast("B"))
        return self._advance()

    def finish(self) -> list[Part]:
        """The last parts, now that no bytes follow."""
        self._source.end()
        return self._advance()

    def _advance(self) -> list[Part]:
        parts = []
        for part in self._steps:
            if part is None:
                break
            parts.append(part)
        return parts

    def _image(self) -> Steps:
        try:
            yield from self._head()
            yield from self._target()
        except Ended as error:
            raise ImageError(str(error), offset=self._source.offset) from None
        yield from self._sections()
        while len((yield from self._source.some())):
            pass

    def _head(self) -> Steps:
        magic, version, words = IMAGE_HEAD.unpack((yield from self._source.take(IMAGE_HEAD.size, "the header")))
        if magic != IMAGE_MAGIC:
            raise ImageError("it is no slot image", offset=0, reason="NO_IMAGE")
        if version not in STATE_VERSIONS:
            known = ", ".join(map(str, STATE_VERSIONS))
            raise ImageError(f"state version {version}, not one of {known}", offset=4, reason="STATE_VERSION")
        if words > self._limits.tokens + PACKED_WORDS:
            raise ImageError(f"{words} tokens, more than {self._limits.tokens}", offset=8)
        self._version = version
        yield Header(version)
        data = yield from self._source.take(4 * words, "the tokens")
        tokens = unpack(data, limits=self._limits, offset=IMAGE_HEAD.size)
        self._tokens = len(tokens)
        yield tokens

    def _target(self) -> Steps:
        """Hands on what belongs to the target state for certain, and puts back what turns out not to."""
        start, sent = self._source.offset, 0
        walker = self._walker(Role.TARGET, partial=False, bounded=False)
        held: list[memoryview] = []
        while walker.summary is None:
            data = yield from self._source.some()
            try:
                walker.feed(data)
                if not len(data):
                    walker.finish()
            except PayloadError as error:
                raise PayloadError(f"target state: {error.problem}", offset=start + error.offset) from None
            held.append(data)
            fed = sent + sum(map(len, held))
            end = walker.summary.bytes if walker.summary else fed - walker.open_bytes
            ready, held = _split(held, max(end - sent, 0))
            for piece in ready:
                yield Piece(TARGET, piece)
            sent += sum(map(len, ready))
            if walker.summary is None:
                held = [memoryview(b"".join(held))]  # 3 bytes at most; what was fed need not stay as it is
        yield BlobEnd(TARGET, walker.summary.bytes, walker.summary)
        if sent == walker.summary.bytes:
            self._source.put_back(held)
        else:
            # Pieces went out of which something unknown is now known to be a part. Nothing behind it matters.
            self._source.put_back([memoryview(walker.follows)])

    def _sections(self) -> Steps:
        seen: set[Section] = set()
        while magic := (yield from self._source.at_most(_MAGIC_BYTES)):
            section = SECTIONS.get(int.from_bytes(magic, "little")) if len(magic) == _MAGIC_BYTES else None
            if section is None:
                yield Unknown(magic)
                return
            start, self._damage = self._source.offset - _MAGIC_BYTES, None
            try:
                if section in seen:
                    raise _Broken("it comes a second time")
                seen.add(section)
                yield from self._section(section)
            except (Ended, _Broken) as error:
                yield Dropped(section, str(error))
                return
            if self._damage is None:
                yield SectionEnd(section, self._source.offset - start)
            else:
                yield Dropped(section, self._damage)

    def _section(self, section: Section) -> Steps:
        version = yield from self._number(struct.Struct("<I"), "its version")
        if version != SECTION_VERSION:
            raise _Broken(f"it has version {version}")
        match section:
            case Section.CHECKPOINTS:
                yield from self._checkpoints()
            case Section.DRAFT:
                yield from self._blob(Blob(section, Role.DRAFT))
                yield from self._blob(Blob(section, Role.SPECULATIVE))
            case _:
                manifest = yield from self._manifest()
                if manifest is not None:
                    yield manifest

    def _checkpoints(self) -> Steps:
        count = yield from self._number(COUNT, "the number of checkpoints")
        if count > self._limits.checkpoints:
            raise _Broken(f"{count} checkpoints, more than {self._limits.checkpoints}")
        for index in range(count):
            data = yield from self._source.take(CHECKPOINT.size, f"checkpoint {index}")
            tokens, first, last = CHECKPOINT.unpack(data)
            if tokens > self._tokens or not 0 <= first <= last < self._limits.tokens:
                self._damaged(f"checkpoint {index} has {tokens} tokens at positions {first} to {last}")
            yield CheckpointHead(index, tokens, first, last)
            for role in Role:
                yield from self._blob(Blob(Section.CHECKPOINTS, role, index))

    def _blob(self, blob: Blob) -> Steps:
        what = f"the {blob.role.value} state" + ("" if blob.checkpoint is None else f" of checkpoint {blob.checkpoint}")
        size = left = yield from self._number(LENGTH, f"the length of {what}")
        if size > self._limits.state_bytes:
            raise _Broken(f"{what} has {size} bytes, more than {self._limits.state_bytes}")
        walker = None
        if size and blob.role is not Role.SPECULATIVE:
            prefix = yield from self._source.take(min(size, BLOB_PREFIX), what)
            yield Piece(blob, memoryview(prefix))
            left -= len(prefix)
            if len(prefix) < BLOB_PREFIX or _PREFIX.unpack(prefix)[0] != BLOB_MAGIC or _PREFIX.unpack(prefix)[1] < 0:
                self._damaged(f"{what} does not begin as the library's states do")
            elif left or blob.role is not Role.DRAFT:  # a draft that shares the target's cells has nothing of its own
                walker = self._walker(blob.role, partial=blob.checkpoint is not None, bounded=True)
        while left:
            data = yield from self._source.some(left)
            if not len(data):
                raise Ended(f"it ends in the middle of {what}")
            left -= len(data)
            walker = self._walk(walker, data, what)
            yield Piece(blob, data)
        walker = self._walk(walker, None, what)
        yield BlobEnd(blob, size, walker.summary if walker else None)

    def _walk(self, walker: PayloadWalker | None, data: memoryview | None, what: str) -> PayloadWalker | None:
        """Feeds or, without data, finishes a walker; None once there is nothing more to learn."""
        try:
            if walker is not None and data is not None:
                walker.feed(data)
            elif walker is not None:
                walker.finish()
        except PayloadError as error:
            self._damaged(f"{what}: {error.problem} (byte {error.offset + BLOB_PREFIX} of it)")
            return None
        return walker

    def _walker(self, role: Role, *, partial: bool, bounded: bool) -> PayloadWalker:
        return PayloadWalker(
            version=self._version,
            kind=self._kinds[role],
            partial=partial,
            layers=self._layers[role],
            bounded=bounded,
            limits=self._limits,
        )

    def _manifest(self) -> Generator[None, None, Manifest | None]:
        size = yield from self._number(LENGTH, "the length")
        if size > self._limits.manifest_bytes:
            raise _Broken(f"it has {size} bytes, more than {self._limits.manifest_bytes}")
        data = yield from self._source.take(size, "the manifest")
        try:
            return decode(data, limits=self._limits)
        except ManifestError as error:
            self._damaged(error.message)
            return None

    def _number(self, format: struct.Struct, what: str) -> Generator[None, None, int]:  # noqa: A002
        number: int = format.unpack((yield from self._source.take(format.size, what)))[0]
        return number

    def _damaged(self, reason: str) -> None:
        """The first reason is the one that counts."""
        if self._damage is None:
            self._damage = reason


def _split(pieces: Iterable[memoryview], size: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `size` bytes, and what is left; no empty pieces."""
    front, back = [], []
    for piece in pieces:
        head, tail = piece[:size], piece[size:]
        size -= len(head)
        front += [head] if len(head) else []
        back += [tail] if len(tail) else []
    return front, back
