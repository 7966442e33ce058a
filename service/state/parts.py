"""What a reader finds in an image, in the order in which it is found."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from service.state.layout import Section
from service.state.manifest import Manifest
from service.state.memory import PayloadSummary
from service.state.tokens import TokenList


class Role(enum.Enum):
    """What a blob is the state of."""

    TARGET = "target"
    DRAFT = "draft"
    SPECULATIVE = "speculative"


@dataclass(frozen=True, slots=True)
class Blob:
    """Which blob: that of a section with a role, in checkpoints that of one of them."""

    section: Section
    role: Role
    checkpoint: int | None = None


TARGET = Blob(Section.TARGET, Role.TARGET)


@dataclass(frozen=True, slots=True)
class Header:
    """`version` is the state version of the library that wrote the image."""

    version: int


@dataclass(frozen=True, slots=True)
class CheckpointHead:
    """Its blobs follow: target, draft, speculative."""

    index: int
    tokens: int
    first_position: int
    last_position: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of a blob: a view of what was fed, valid as long as that does not change."""

    blob: Blob
    data: memoryview


@dataclass(frozen=True, slots=True)
class BlobEnd:
    """A blob has `size` bytes. `payload` is what they hold, None for an empty or speculative one.

    The target state may turn out to be shorter than the pieces that came; the first `size` bytes count then.
    """

    blob: Blob
    size: int
    payload: PayloadSummary | None


@dataclass(frozen=True, slots=True)
class SectionEnd:
    """All of a section behind the target state was read and is sound. Until then its parts do not count.

    `size` is in bytes, with its magic.
    """

    section: Section
    size: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A section is damaged. What came of it does not count; the rest of the image does."""

    section: Section
    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """From here on the image belongs to someone newer: 4 bytes that begin no section we know, fewer at the end."""

    magic: bytes


Part = Header | TokenList | CheckpointHead | Piece | BlobEnd | SectionEnd | Dropped | Manifest | Unknown
