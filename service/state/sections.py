"""The sections behind the target state: their values, and how they are written.

Sources: the changes to llama-server that introduced SCKP and SDFT; SLWM is our own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.state.layout import LIMITS, SECTION_MAGICS, SECTION_VERSION, Limits, Section
from service.state.manifest import Manifest

Bytes = bytes | memoryview
"""A blob. Readers hand out views where they need not join; they compare and hash like bytes."""

HEAD = struct.Struct("<II")
"""Magic, version."""
COUNT = struct.Struct("<I")
CHECKPOINT = struct.Struct("<Qii")
"""Tokens, first and last position."""
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A context checkpoint: what of the state cannot be rolled back, as it was after `tokens` tokens.

    `target` and `draft` were written with PARTIAL_ONLY and begin with the magic and sequence id of the library;
    `draft` is empty where there was none. `speculative` is what the proposer adds.
    """

    tokens: int
    first_position: int
    last_position: int
    target: Bytes
    draft: Bytes = b""
    speculative: Bytes = b""


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft context of a slot, with the library's magic and sequence id, and what the proposer adds."""

    state: Bytes
    speculative: Bytes = b""


def checkpoint_pieces(checkpoints: Sequence[Checkpoint]) -> Iterator[Bytes]:
    """The section; nothing where there is nothing to say."""
    if not checkpoints:
        return
    yield _head(Section.CHECKPOINTS) + COUNT.pack(len(checkpoints))
    for checkpoint in checkpoints:
        yield CHECKPOINT.pack(checkpoint.tokens, checkpoint.first_position, checkpoint.last_position)
        for blob in (checkpoint.target, checkpoint.draft, checkpoint.speculative):
            yield from _blob(blob)


def draft_pieces(draft: Draft | None) -> Iterator[Bytes]:
    if draft is None:
        return
    yield _head(Section.DRAFT)
    yield from _blob(draft.state)
    yield from _blob(draft.speculative)


def manifest_pieces(manifest: Manifest | None, *, limits: Limits = LIMITS) -> Iterator[Bytes]:
    """Raises ManifestError."""
    if manifest is None:
        return
    data = manifest.encode(limits=limits)
    yield _head(Section.MANIFEST) + LENGTH.pack(len(data)) + data


def _head(section: Section) -> bytes:
    return HEAD.pack(SECTION_MAGICS[section], SECTION_VERSION)


def _blob(data: Bytes) -> Iterator[Bytes]:
    yield LENGTH.pack(len(data))
    if len(data):
        yield data
