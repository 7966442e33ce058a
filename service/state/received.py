"""An image that came in pieces and lies in one buffer: where its blobs are in there, so that none is copied.

A reader's pieces do not say where they belong; the layout and the sizes of what came before do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from service.state.collector import Collector
from service.state.image import ImageRead, SlotImage
from service.state.layout import BLOB_PREFIX, Section
from service.state.memory import PayloadSummary
from service.state.parts import TARGET, Blob, BlobEnd, CheckpointHead, Dropped, Part, Role, SectionEnd
from service.state.reader import IMAGE_HEAD
from service.state.sections import CHECKPOINT, COUNT, HEAD, LENGTH, Checkpoint, Draft
from service.state.tokens import TokenList


@dataclass(frozen=True, slots=True)
class Completed:
    """An image that came whole, is sound, and has the digest that its sender computed.

    `buffer` is all of it, writable. The blobs of `read.image` are read-only views of it, and change with it.
    `target_offset` is where the target state begins, in bytes.
    """

    buffer: memoryview
    read: ImageRead
    target_offset: int
    digest: str

    @property
    def prefixed_target(self) -> memoryview:
        """The target state, writable, with BLOB_PREFIX bytes before it: room for the magic and sequence id that the
        library wants there. The token list, of which those bytes are the end, has been read.
        """
        start = self.target_offset
        return self.buffer[start - BLOB_PREFIX : start + self.read.payload.bytes]


@dataclass(slots=True)
class Places(Collector):
    """Finds the places of all blobs in `buffer`, which is filled before the parts of what came are added."""

    buffer: memoryview = field(kw_only=True)
    target_offset: int = 0
    places: dict[Blob, slice] = field(default_factory=dict)
    payloads: dict[Blob, PayloadSummary] = field(default_factory=dict)
    complete: set[Section] = field(default_factory=lambda: {Section.TARGET})
    section: int = 0
    """Where the section at hand begins."""
    at: int = 0
    """Where the next part of it begins."""

    def take(self, part: Part) -> None:
        match part:
            case TokenList():
                self.target_offset = self.at = IMAGE_HEAD.size + len(part.pack())
            case CheckpointHead(index):
                self.at += CHECKPOINT.size + (HEAD.size + COUNT.size if index == 0 else 0)
            case BlobEnd(blob, size, payload):
                self._place(blob, size)
                if payload is not None:
                    self.payloads[blob] = payload
            case SectionEnd(section, size):
                self.complete.add(section)
                self.section = self.at = self.section + size
            case Dropped(section):
                self._pass_over(section)

    def _place(self, blob: Blob, size: int) -> None:
        if blob.section is Section.DRAFT and blob.role is Role.DRAFT:
            self.at += HEAD.size
        if blob != TARGET:
            self.at += LENGTH.size
        self.places[blob] = slice(self.at, self.at + size)
        self.at += size
        if blob == TARGET:
            self.section = self.at

    def _pass_over(self, section: Section) -> None:
        """A damaged section whose end is known. Where it is not, no parts follow, and the place does not matter."""
        if section is Section.MANIFEST:
            start = self.section + HEAD.size
            length = int.from_bytes(self.buffer[start : start + LENGTH.size], "little")
            self.at = start + LENGTH.size + length
        self.section = self.at

    def result(self, digest: str) -> Completed:
        """After the last part."""
        image = SlotImage(
            version=self.version,
            tokens=self.tokens,
            target=self._view(TARGET),
            checkpoints=tuple(map(self._checkpoint, self.heads)) if Section.CHECKPOINTS in self.complete else (),
            draft=Draft(*(self._view(Blob(Section.DRAFT, role)) for role in (Role.DRAFT, Role.SPECULATIVE)))
            if Section.DRAFT in self.complete
            else None,
            manifest=self.manifest,
        )
        payloads = {blob: payload for blob, payload in self.payloads.items() if blob.section in self.complete}
        read = ImageRead(image, payloads, self.dropped, self.unknown)
        return Completed(self.buffer, read, self.target_offset, digest)

    def _checkpoint(self, head: CheckpointHead) -> Checkpoint:
        blobs = (self._view(Blob(Section.CHECKPOINTS, role, head.index)) for role in Role)
        return Checkpoint(head.tokens, head.first_position, head.last_position, *blobs)

    def _view(self, blob: Blob) -> memoryview:
        return self.buffer[self.places[blob]].toreadonly()
