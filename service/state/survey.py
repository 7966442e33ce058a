"""What is in an image, without the states themselves: a look at a file that may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from service.state.collector import Collector
from service.state.layout import LIMITS, Limits, Section
from service.state.manifest import Manifest
from service.state.memory import PayloadSummary
from service.state.parts import (
    TARGET,
    Blob,
    BlobEnd,
    CheckpointHead,
    Part,
    Role,
    SectionEnd,
)
from service.state.reader import ImageReader
from service.state.tokens import TokenList


@dataclass(frozen=True, slots=True)
class BlobSurvey:
    """Size in bytes, and what is in it; None for an empty or speculative one."""

    size: int
    payload: PayloadSummary | None


@dataclass(frozen=True, slots=True)
class CheckpointSurvey:
    tokens: int
    first_position: int
    last_position: int
    target: BlobSurvey
    draft: BlobSurvey
    speculative: BlobSurvey


@dataclass(frozen=True, slots=True)
class DraftSurvey:
    state: BlobSurvey
    speculative: BlobSurvey


@dataclass(frozen=True, slots=True)
class ImageSurvey:
    """Sizes are bytes. `sections` are those of the sound sections behind the target state, with their heads.

    `dropped` are the damaged sections and why, `unknown` is the magic at which reading stopped, empty where it did not,
    and `unread` counts all bytes that do not belong to a sound section.
    """

    size: int
    version: int
    tokens: TokenList
    target: PayloadSummary
    checkpoints: tuple[CheckpointSurvey, ...]
    draft: DraftSurvey | None
    manifest: Manifest | None
    sections: Mapping[Section, int]
    dropped: Mapping[Section, str]
    unknown: bytes
    unread: int


def survey(pieces: Iterable[bytes | memoryview], *, limits: Limits = LIMITS) -> ImageSurvey:
    """Looks through the pieces of an image. Raises ImageError."""
    reader = ImageReader(limits=limits)
    surveyor = _Surveyor()
    for piece in pieces:
        surveyor.size += len(piece)
        surveyor.add(reader.feed(piece))
    surveyor.add(reader.finish())
    return surveyor.result()


@dataclass(slots=True)
class _Surveyor(Collector):
    size: int = 0
    blobs: dict[Blob, BlobSurvey] = field(default_factory=dict)
    sections: dict[Section, int] = field(default_factory=dict)
    target: PayloadSummary | None = None

    def take(self, part: Part) -> None:
        match part:
            case BlobEnd(blob, size, payload):
                self.blobs[blob] = BlobSurvey(size, payload)
                if blob == TARGET:
                    self.target = payload
            case SectionEnd(section, size):
                self.sections[section] = size

    def result(self) -> ImageSurvey:
        assert self.target is not None  # the reader raises where there is none
        checkpoints = self.heads if Section.CHECKPOINTS in self.sections else []
        head = 12 + len(self.tokens.pack())
        return ImageSurvey(
            size=self.size,
            version=self.version,
            tokens=self.tokens,
            target=self.target,
            checkpoints=tuple(self._checkpoint(checkpoint) for checkpoint in checkpoints),
            draft=self._draft() if Section.DRAFT in self.sections else None,
            manifest=self.manifest,
            sections=self.sections,
            dropped=self.dropped,
            unknown=self.unknown,
            unread=self.size - head - self.target.bytes - sum(self.sections.values()),
        )

    def _checkpoint(self, head: CheckpointHead) -> CheckpointSurvey:
        target, draft, speculative = (self.blobs[Blob(Section.CHECKPOINTS, role, head.index)] for role in Role)
        return CheckpointSurvey(head.tokens, head.first_position, head.last_position, target, draft, speculative)

    def _draft(self) -> DraftSurvey:
        state, speculative = (self.blobs[Blob(Section.DRAFT, role)] for role in (Role.DRAFT, Role.SPECULATIVE))
        return DraftSurvey(state, speculative)
