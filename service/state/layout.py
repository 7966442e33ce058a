"""Numbers that the layout of a slot image is made of: magics, versions, limits, tensor types.

Sources: `llama.h` (GGSQ, state version), `ggml.h` and `ggml-common.h` (types and their blocks) of llama.cpp.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

IMAGE_MAGIC = 0x67677371
"""'ggsq' of llama.cpp's sequence state files."""
STATE_VERSIONS = (2, 3, 4)
"""Of llama.cpp's library, whose payload layouts are known. Version 4 adds the rotation of keys and values."""
ROTATION_VERSION = 4
SECTION_VERSION = 1
"""Of each section behind the target state, and of packed tokens."""
BLOB_MAGIC = 0xAF143CD8
"""Stands, with a sequence id, before the payload in what `llama_state_seq_get_data_ext` returns."""
BLOB_PREFIX = 8
"""Bytes of that magic and id. The target state of an image goes without them."""


class Section(enum.Enum):
    """What an image has besides its header; the value is the name in manifests and messages."""

    TOKENS = "tokens"
    TARGET = "target"
    CHECKPOINTS = "checkpoints"
    DRAFT = "draft"
    MANIFEST = "manifest"


SECTION_MAGICS = {
    Section.CHECKPOINTS: 0x504B4353,  # 'SCKP'
    Section.DRAFT: 0x54464453,  # 'SDFT'
    Section.MANIFEST: 0x4D574C53,  # 'SLWM'
}
SECTIONS = {magic: section for section, magic in SECTION_MAGICS.items()}


@dataclass(frozen=True, slots=True)
class Limits:
    """What an image may claim. Larger numbers are refused before anything is kept for them.

    The defaults are beyond what llama.cpp can have (512 layers, 256 sequences), or beyond all models known. One who
    knows the slot that an image is meant for sets `tokens` to its context.
    """

    tokens: int = 1 << 24
    """Also the largest count of cells and the first position that is too large."""
    layers: int = 512
    streams: int = 256
    row_bytes: int = 1 << 30
    """One cell of one tensor."""
    state_bytes: int = 1 << 42
    """A payload or a blob."""
    checkpoints: int = 1024
    manifest_bytes: int = 1 << 20
    position_runs: int = 1 << 16
    """Runs of consecutive positions in the cells of one cache; one in most, more where cells were used again."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class TensorType:
    """Elements of a tensor come in blocks of `block` elements in `bytes` bytes."""

    name: str
    block: int
    bytes: int


TENSOR_TYPES = {
    number: TensorType(name, block, size)
    for number, name, block, size in (
        (0, "f32", 1, 4),
        (1, "f16", 1, 2),
        (2, "q4_0", 32, 18),
        (3, "q4_1", 32, 20),
        (6, "q5_0", 32, 22),
        (7, "q5_1", 32, 24),
        (8, "q8_0", 32, 34),
        (9, "q8_1", 32, 36),
        (10, "q2_K", 256, 84),
        (11, "q3_K", 256, 110),
        (12, "q4_K", 256, 144),
        (13, "q5_K", 256, 176),
        (14, "q6_K", 256, 210),
        (15, "q8_K", 256, 292),
        (16, "iq2_xxs", 256, 66),
        (17, "iq2_xs", 256, 74),
        (18, "iq3_xxs", 256, 98),
        (19, "iq1_s", 256, 50),
        (20, "iq4_nl", 32, 18),
        (21, "iq3_s", 256, 110),
        (22, "iq2_s", 256, 82),
        (23, "iq4_xs", 256, 136),
        (24, "i8", 1, 1),
        (25, "i16", 1, 2),
        (26, "i32", 1, 4),
        (27, "i64", 1, 8),
        (28, "f64", 1, 8),
        (29, "iq1_m", 256, 56),
        (30, "bf16", 1, 2),
        (34, "tq1_0", 256, 54),
        (35, "tq2_0", 256, 66),
        (39, "mxfp4", 32, 17),
        (40, "nvfp4", 64, 36),
        (41, "q1_0", 128, 18),
        (42, "q2_0", 64, 18),
    )
}
"""By their number in `enum ggml_type`."""
