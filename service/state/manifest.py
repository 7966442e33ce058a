"""Our own section of an image: what llama-server does not keep, as a JSON object.

A reader keeps keys that it does not know. All keys but `format`, `fingerprint`, `model`, `tokens` and `created` may be
missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from service.state.errors import ManifestError
from service.state.layout import LIMITS, Limits

FORMAT = 1
"""A larger number means a manifest that this code does not understand."""

_END_OF_TIME = 1e11
"""In the year 5138; seconds that are in fact milliseconds are beyond it."""

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What goes with a state.

    `fingerprint` says what the state fits, `model` describes it to people. `tokens` is the number of tokens in the
    state, and `pending_token` one that was sampled and is not in it yet. `sampling` and `speculation` are the states of
    the sampler and of speculation. `digests` are texts of
    `integrity.Digest` ("blake3:ab..."), by section. `created` is seconds since the
    epoch. `extra` are keys of someone newer.
    """

    fingerprint: Object
    model: str
    tokens: int
    created: float
    pending_token: int | None = None
    sampling: Object | None = None
    speculation: Object | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    extra: Object = field(default_factory=dict)

    def encode(self, *, limits: Limits = LIMITS) -> bytes:
        """UTF-8 JSON. Raises ManifestError for what JSON does not have or a reader would refuse."""
        known = {name: getattr(self, name) for name in _KEYS}
        value = {**self.extra, "format": FORMAT, **{key: known[key] for key in _KEYS if known[key] is not None}}
        try:
            data = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ManifestError(f"it cannot be written as JSON: {error}") from None
        decode(data, limits=limits)
        return data


_KEYS = tuple(item.name for item in fields(Manifest) if item.name != "extra")


def decode(data: bytes, *, limits: Limits = LIMITS) -> Manifest:
    """The manifest that UTF-8 JSON holds. Raises ManifestError."""
    if len(data) > limits.manifest_bytes:
        raise ManifestError(f"{len(data)} bytes, more than {limits.manifest_bytes}")
    value = _parse(data)
    version = _take(value, "format", int)
    if version != FORMAT:
        raise ManifestError(f"format {version}, not {FORMAT}")
    tokens, pending = _take(value, "tokens", int), _take(value, "pending_token", int, required=False)
    if not 0 <= tokens <= limits.tokens or not 0 <= (pending or 0) < 1 << 31:
        raise ManifestError(f"{tokens} tokens, pending token {pending}")
    created = _take(value, "created", (int, float))
    if not 0 <= created < _END_OF_TIME:
        raise ManifestError(f"created at {created}")
    digests = _take(value, "digests", dict, required=False) or {}
    if not all(isinstance(digest, str) for digest in digests.values()):
        raise ManifestError("digests are not text")
    return Manifest(
        fingerprint=_take(value, "fingerprint", dict),
        model=_take(value, "model", str),
        tokens=tokens,
        created=float(created),
        pending_token=pending,
        sampling=_take(value, "sampling", dict, required=False),
        speculation=_take(value, "speculation", dict, required=False),
        digests=digests,
        extra=value,
    )


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode(), parse_constant=_refuse)
        # finds what Python reads and UTF-8 has no bytes for: halves of surrogate pairs
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"it is not UTF-8 JSON: {error}") from None
    if not isinstance(value, dict):
        raise ManifestError("it is no JSON object")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _take(value: dict[str, Any], key: str, kind: type | tuple[type, ...], *, required: bool = True) -> Any:
    """Removes and returns a value of a type; None is as good as missing."""
    found = value.pop(key, None)
    if found is None and not required:
        return None
    if (
        not isinstance(found, kind)
        or isinstance(found, bool)
        or (isinstance(found, float) and not math.isfinite(found))
    ):
        raise ManifestError(f"{key} is missing or of another type")
    return found
