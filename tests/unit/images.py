"""Payloads and images for tests, made by hand: small, and of every kind of memory."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from service.state.image import SlotImage, image_pieces
from service.state.layout import BLOB_MAGIC, ROTATION_VERSION, TENSOR_TYPES
from service.state.manifest import Manifest
from service.state.memory import CacheKind, MemoryKind
from service.state.sections import Checkpoint, Draft
from service.state.tokens import TokenList

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.bin"))
PREFIX = struct.pack("<Ii", BLOB_MAGIC, 0)
F32, F16, Q8_0 = 0, 1, 8


def attention_cache(
    positions: Sequence[int],
    *,
    layers: int = 2,
    version: int = 3,
    values: bool = True,
    transposed: bool = False,
    extension: int = 0,
    kind: int = F16,
    row: int | None = None,
    streams: int = 1,
    rotation: tuple[int, int] = (0, 0),
) -> bytes:
    """As llama.cpp writes one; the cells of the sequence are in the last stream."""
    row = TENSOR_TYPES[kind].bytes if row is None else row
    data = struct.pack("<I", streams) + bytes(4 * (streams - 1)) + struct.pack("<I", len(positions))
    if not positions:
        return data
    for position in positions:
        data += struct.pack("<iI", position, 1) + b"\7" * extension + struct.pack("<i", 0)
    data += struct.pack("<II", transposed, layers)
    if version >= ROTATION_VERSION:
        data += struct.pack("<II", *rotation)
    keys = struct.pack("<iQ", kind, row) + b"k" * (row * len(positions))
    element = TENSOR_TYPES[kind].bytes
    columns = struct.pack("<iII", kind, element, row // element) + b"v" * (row * len(positions))
    rows = struct.pack("<iQ", kind, row) + b"v" * (row * len(positions))
    return data + keys * layers + (columns if transposed else rows) * (layers if values else 0)


def recurrent_cache(position: int | None, *, layers: int = 3, own: int = 2, rows: tuple[int, int] = (8, 4)) -> bytes:
    """As llama.cpp writes one for a model with `layers` layers of which `own` are recurrent."""
    cells = position is not None
    data = (
        struct.pack("<I", cells) + (struct.pack("<iI", position, 0) if cells else b"") + struct.pack("<II", 0, layers)
    )
    for row in rows:
        data += (struct.pack("<iQ", F32, row) + b"r" * (row * cells)) * own
    return data


def payload(kind: MemoryKind, tokens: int = 3, *, version: int = 3, partial: bool = False) -> bytes:
    """Of a sequence of that many tokens."""
    caches = kind.partial if partial else kind.caches
    return b"".join(
        attention_cache(range(tokens), version=version)
        if cache is CacheKind.ATTENTION
        else recurrent_cache(tokens - 1 if tokens else None)
        for cache in caches
    )


def manifest(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "fingerprint": {"architecture": "lfm2", "weights": "ab" * 32},
        "model": "tiny hybrid",
        "tokens": 3,
        "created": 1_790_000_000.5,
        "pending_token": 7,
        "sampling": {"seed": 3},
        "speculation": {"drafted": 10, "accepted": 4},
        "digests": {"target": "cd" * 32},
        "extra": {"from a newer version": [1, 2.5, None, "é"]},
    }
    return Manifest(**(fields | changes))  # type: ignore[arg-type]


def full_image(kind: MemoryKind = MemoryKind.HYBRID, *, version: int = 3) -> SlotImage:
    """A small image with every section."""
    checkpoints = (
        Checkpoint(1, 0, 0, PREFIX + payload(kind, 1, version=version, partial=True)),
        Checkpoint(
            2,
            0,
            1,
            PREFIX + payload(kind, 2, version=version, partial=True),
            PREFIX + payload(MemoryKind.RECURRENT, 2, version=version, partial=True),
            b"spec",
        ),
    )
    return SlotImage(
        version=version,
        tokens=TokenList.of((5, 6, 7)),
        target=payload(kind, version=version),
        checkpoints=checkpoints,
        draft=Draft(PREFIX + payload(MemoryKind.ATTENTION, version=version), b"n-grams"),
        manifest=manifest(),
    )


def small_image() -> SlotImage:
    """As few bytes as every section can do with, for tests that look at each of them."""
    recurrent = recurrent_cache(0, layers=1, own=1, rows=(4, 0))
    return SlotImage(
        version=3,
        tokens=TokenList.of((5,)),
        target=attention_cache([0], layers=1) + recurrent,
        checkpoints=(Checkpoint(1, 0, 0, PREFIX + recurrent, PREFIX + recurrent, b"s"),),
        draft=Draft(PREFIX + recurrent, b"n"),
        manifest=Manifest(fingerprint={}, model="m", tokens=1, created=1.0),
    )


def written(image: SlotImage) -> bytes:
    return b"".join(image_pieces(image))
