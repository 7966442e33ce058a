"""A whole slot image: byte for byte a slot file of llama-server.

u32 'ggsq', u32 state version, u32 words, the token list          `tokens`
target state, as the library wrote it, without its first 8 bytes  `payload` finds its end
checkpoints 'SCKP', draft 'SDFT', manifest 'SLWM'                 `sections`, `manifest`; each may be missing
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from service.state.collector import Collector
from service.state.errors import ImageError
from service.state.layout import IMAGE_MAGIC, LIMITS, STATE_VERSIONS, Limits, Section
from service.state.manifest import Manifest
from service.state.memory import MemoryKind, PayloadSummary
from service.state.parts import (
    TARGET,
    Blob,
    BlobEnd,
    CheckpointHead,
    Dropped,
    Part,
    Piece,
    Role,
    SectionEnd,
)
from service.state.reader import IMAGE_HEAD, ImageReader
from service.state.sections import (
    Bytes,
    Checkpoint,
    Draft,
    checkpoint_pieces,
    draft_pieces,
    manifest_pieces,
)
from service.state.tokens import TokenList


@dataclass(frozen=True, slots=True)
class SlotImage:
    """The state of a slot. `version` is the state version of the library; `target` is without its 8 byte prefix."""

    version: int
    tokens: TokenList
    target: Bytes
    checkpoints: tuple[Checkpoint, ...] = ()
    draft: Draft | None = None
    manifest: Manifest | None = None


@dataclass(frozen=True, slots=True)
class ImageRead:
    """An image, and what was learned by reading it.

    `payloads` tells of each state blob what is in it. `dropped` are the sections that were damaged and why; they are
    not in the image. `unknown` is the magic at which reading stopped before the end, empty where it did not.
    """

    image: SlotImage
    payloads: Mapping[Blob, PayloadSummary]
    dropped: Mapping[Section, str]
    unknown: bytes = b""

    @property
    def payload(self) -> PayloadSummary:
        """Of the target state."""
        return self.payloads[TARGET]


def read_image(
    data: bytes | memoryview | Iterable[bytes | memoryview],
    *,
    target: MemoryKind | None = None,
    draft: MemoryKind | None = None,
    layers: int | None = None,
    limits: Limits = LIMITS,
) -> ImageRead:
    """The image that `data`, or its pieces, hold. A blob that comes in one piece is a view of it, not a copy.

    The rest is as for ImageReader. Raises ImageError.
    """
    reader = ImageReader(target=target, draft=draft, layers=layers, limits=limits)
    collector = _Collector()
    for piece in (data,) if isinstance(data, bytes | memoryview) else data:
        collector.add(reader.feed(piece))
    collector.add(reader.finish())
    return collector.result()


def image_pieces(image: SlotImage, *, limits: Limits = LIMITS) -> Iterator[Bytes]:
    """The bytes of an image. Blobs come as they are, of whatever size, without a copy. Raises ManifestError."""
    yield head_bytes(image.version, image.tokens)
    yield image.target
    for section in (Section.CHECKPOINTS, Section.DRAFT, Section.MANIFEST):
        yield from section_pieces(image, section, limits=limits)


def head_bytes(version: int, tokens: TokenList) -> bytes:
    """What stands before the target state. Raises ImageError for a version whose layout is not known."""
    if version not in STATE_VERSIONS:
        raise ImageError(f"state version {version}", offset=4, reason="STATE_VERSION")
    words = tokens.pack()
    return IMAGE_HEAD.pack(IMAGE_MAGIC, version, len(words) // 4) + words


def section_pieces(image: SlotImage, section: Section, *, limits: Limits = LIMITS) -> Iterator[Bytes]:
    """The bytes of one section, with its magic; of the tokens without their number. Nothing where it is missing."""
    match section:
        case Section.TOKENS:
            yield image.tokens.pack()
        case Section.TARGET:
            yield image.target
        case Section.CHECKPOINTS:
            yield from checkpoint_pieces(image.checkpoints)
        case Section.DRAFT:
            yield from draft_pieces(image.draft)
        case Section.MANIFEST:
            yield from manifest_pieces(image.manifest, limits=limits)


def image_size(image: SlotImage, *, limits: Limits = LIMITS) -> int:
    """Bytes."""
    return sum(map(len, image_pieces(image, limits=limits)))


@dataclass(slots=True)
class _Collector(Collector):
    """Puts the parts of an image together."""

    pieces: dict[Blob, list[memoryview]] = field(default_factory=dict)
    blobs: dict[Blob, Bytes] = field(default_factory=dict)
    payloads: dict[Blob, PayloadSummary] = field(default_factory=dict)
    complete: set[Section] = field(default_factory=set)

    def take(self, part: Part) -> None:
        match part:
            case Piece(blob, data):
                self.pieces.setdefault(blob, []).append(data)
            case BlobEnd(blob, size, payload):
                self.blobs[blob] = _joined(self.pieces.pop(blob, []), size)
                if payload is not None:
                    self.payloads[blob] = payload
            case SectionEnd(section):
                self.complete.add(section)
            case Dropped(section):
                self._free(section)

    def result(self) -> ImageRead:
        checkpoints, draft = Section.CHECKPOINTS in self.complete, Section.DRAFT in self.complete
        image = SlotImage(
            version=self.version,
            tokens=self.tokens,
            target=self.blobs[TARGET],
            checkpoints=tuple(self._checkpoint(head) for head in self.heads) if checkpoints else (),
            draft=Draft(*(self.blobs[Blob(Section.DRAFT, role)] for role in (Role.DRAFT, Role.SPECULATIVE)))
            if draft
            else None,
            manifest=self.manifest,
        )
        return ImageRead(image, self.payloads, self.dropped, self.unknown)

    def _checkpoint(self, head: CheckpointHead) -> Checkpoint:
        blobs = (self.blobs[Blob(Section.CHECKPOINTS, role, head.index)] for role in Role)
        return Checkpoint(head.tokens, head.first_position, head.last_position, *blobs)

    def _free(self, section: Section) -> None:
        """Let go of what came of a damaged section. A second section of a kind takes nothing from the first."""
        if section not in self.complete:
            for found in (self.pieces, self.blobs, self.payloads):
                for blob in [blob for blob in found if blob.section is section]:
                    del found[blob]


def _joined(pieces: list[memoryview], size: int) -> Bytes:
    """The first `size` bytes; a view where that needs no copy."""
    if len(pieces) == 1:
        return pieces[0][:size]
    return b"".join(pieces)[:size]
