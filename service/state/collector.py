"""What everyone who puts the parts of an image together keeps of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from service.state.layout import Section
from service.state.manifest import Manifest
from service.state.parts import CheckpointHead, Dropped, Header, Part, Unknown
from service.state.tokens import TokenList


@dataclass(slots=True)
class Collector(ABC):
    """Keeps all parts but blobs and the ends of sections, of which its kinds keep different things."""

    version: int = 0
    tokens: TokenList = field(default_factory=lambda: TokenList(b""))
    heads: list[CheckpointHead] = field(default_factory=list)
    dropped: dict[Section, str] = field(default_factory=dict)
    manifest: Manifest | None = None
    unknown: bytes = b""

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case Header(version):
                    self.version = version
                case TokenList():
                    self.tokens = part
                case CheckpointHead():
                    self.heads.append(part)
                case Dropped(section, reason):
                    self.dropped[section] = reason
                case Manifest():
                    self.manifest = part
                case Unknown(magic):
                    self.unknown = magic
            self.take(part)

    @abstractmethod
    def take(self, part: Part) -> None:
        """Keep what this kind wants of a part."""
