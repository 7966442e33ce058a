"""What two backends compare before they exchange state: all that the bytes of a state depend on."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from service.state.errors import ManifestError
from service.state.integrity import Digest

_MAX_TEXT = 256
"""Characters. Longer than any name or digest."""
_MAX_NUMBER = 1 << 53
"""What a double holds exactly."""
_TOKEN = struct.Struct("<II")
_BATCH = 1 << 16


@dataclass(frozen=True, slots=True, order=True)
class Lora:
    """An adapter: the digest of its file's content, and its scale."""

    digest: str
    scale: float


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions are turned. None is the model's own value, which the digest of its weights covers.

    `scaling` is none, linear, yarn or longrope. The others are llama.cpp's `rope_freq_*` and `yarn_*`.
    """

    scaling: str | None = None
    frequency_base: float | None = None
    frequency_scale: float | None = None
    yarn_extension_factor: float | None = None
    yarn_attention_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_original_context: int | None = None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of a target or a draft context. Digests are texts of `integrity.Digest`.

    `weights` is of the content of the model's file, `vocabulary` of its tokens. `cache_type_k` and `cache_type_v` are
    names of tensor types. `flash_attention` is whether it is used, not what was asked for. `state_version` is that of
    the library. `loras` is a set: it is kept sorted.
    """

    architecture: str
    weights: str
    vocabulary: str
    cache_type_k: str
    cache_type_v: str
    flash_attention: bool
    state_version: int
    loras: tuple[Lora, ...] = ()
    rope: Rope = field(default_factory=Rope)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loras", tuple(sorted(self.loras)))

    def mapping(self) -> dict[str, Any]:
        """As JSON has it. RoPE settings that are the model's own are left out."""
        rope = {key: value for key, value in asdict(self.rope).items() if value is not None}
        return {**asdict(self), "loras": [asdict(lora) for lora in self.loras], "rope": rope}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint of a mapping from JSON, without keys of someone newer.

        `loras` and `rope` may be missing. Raises ManifestError.
        """
        flat = {key: _take(value, key, kind) for key, kind in _KINDS.items()}
        loras = _take(value, "loras", list, required=False) or []
        rope = _take(value, "rope", dict, required=False) or {}
        return cls(**flat, loras=tuple(map(_lora, loras)), rope=_rope(rope))


_KINDS: Mapping[str, type] = {
    "architecture": str,
    "weights": str,
    "vocabulary": str,
    "cache_type_k": str,
    "cache_type_v": str,
    "flash_attention": bool,
    "state_version": int,
}
_ROPE_KINDS: Mapping[str, type] = {"scaling": str, "yarn_original_context": int}
"""The others are numbers."""


class Difference(NamedTuple):
    """A field that two fingerprints do not agree in, and both values as text. Its own text is for messages."""

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field} is {self.ours} here and {self.theirs} there"


def differences(ours: Fingerprint, theirs: Fingerprint) -> list[Difference]:
    """The fields that differ, in their order, named as in the mapping; RoPE settings one by one ("rope.scaling")."""
    mine, other = _flat(ours), _flat(theirs)
    return [Difference(name, _text(mine[name]), _text(other[name])) for name in mine if mine[name] != other[name]]


def vocabulary_digest(tokens: Iterable[tuple[bytes, int]]) -> str:
    """Of all tokens in the order of their ids: bytes, and attributes as the library's bit set (u32)."""
    digest, batch = Digest(), bytearray()
    for data, attributes in tokens:
        batch += _TOKEN.pack(len(data), attributes) + data
        if len(batch) >= _BATCH:
            digest.update(bytes(batch))
            batch.clear()
    digest.update(bytes(batch))
    return digest.text()


def _flat(fingerprint: Fingerprint) -> dict[str, object]:
    flat = {item.name: getattr(fingerprint, item.name) for item in fields(Fingerprint) if item.name != "rope"}
    return flat | {f"rope.{key}": value for key, value in asdict(fingerprint.rope).items()}


def _text(value: object) -> str:
    if value is None:
        return "the model's own"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(f"{lora.digest} x {lora.scale:g}" for lora in value) or "none"
    return str(value)


def _lora(value: object) -> Lora:
    if not isinstance(value, dict):
        raise _bad("loras")
    return Lora(_take(value, "digest", str), float(_take(value, "scale", (int, float))))


def _rope(value: Mapping[str, Any]) -> Rope:
    kinds = {item.name: _ROPE_KINDS.get(item.name, (int, float)) for item in fields(Rope)}
    return Rope(**{key: _take(value, key, kind, required=False) for key, kind in kinds.items()})


def _take(value: Mapping[str, Any], key: str, kind: type | tuple[type, ...], *, required: bool = True) -> Any:
    """A value of a type; None, as good as missing, where it is not required."""
    found = value.get(key)
    if found is None and not required:
        return None
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool) or not _sane(found):
        raise _bad(key)
    return found


def _sane(value: object) -> bool:
    """Whether a message can hold it, and a double."""
    if isinstance(value, str):
        return 0 < len(value) <= _MAX_TEXT and value.isprintable()
    return not isinstance(value, (int, float)) or abs(value) <= _MAX_NUMBER  # which NaN and infinity are not


def _bad(key: str) -> ManifestError:
    return ManifestError(f"fingerprint: {key} is missing or of another type", reason="BAD_FINGERPRINT")
