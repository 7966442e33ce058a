"""What is known of a snapshot without reading it, and the entry of a store that holds this: a JSON object.

The entry is what makes a snapshot. It is written last, in one piece, and names the data, which nothing else names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from service.errors import DataLoss, FieldViolation, InvalidRequest
from service.state.integrity import digest_name
from service.state.layout import LIMITS
from service.state.names import check_name

FORMAT = 1
"""A larger number means an entry that this code does not understand."""
MAX_ENTRY = 64 << 10
"""Bytes of an entry."""
MAX_MODEL = 512
MAX_METADATA = 64
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 1024
"""Characters, but for the number of metadata."""

_DESCRIPTION_ROOM = 4 << 10
"""Of an entry, for all that the description does not hold."""
_END_OF_TIME = 1e11
"""In the year 5138; seconds that are in fact milliseconds are beyond it."""
_DATA_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Description:
    """What the one who saves knows of a snapshot.

    `tokens` is how many the state has, `model` describes to people what it is for, `fingerprint` says what it fits, as
    JSON has it. `metadata` is whatever the caller wants to keep with it.
    """

    tokens: int = 0
    model: str = ""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raises InvalidRequest for what no entry can hold."""
        violations = [FieldViolation(name, problem) for name, problem in self._problems().items()]
        if violations:
            raise InvalidRequest(*violations)
        try:
            size = len(_encoded(_values(self)))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(FieldViolation("fingerprint", f"cannot be written as JSON: {error}")) from None
        if size > MAX_ENTRY - _DESCRIPTION_ROOM:
            most = MAX_ENTRY - _DESCRIPTION_ROOM
            raise InvalidRequest(FieldViolation("metadata", f"is {size} bytes with the rest; the limit is {most}"))

    def _problems(self) -> dict[str, str]:
        """By field, what is wrong with it."""
        found = {}
        if not 0 <= self.tokens <= LIMITS.tokens:
            found["tokens"] = f"must be 0 to {LIMITS.tokens}"
        if len(self.model) > MAX_MODEL or not _text(self.model):
            found["model"] = f"must be text of up to {MAX_MODEL} characters"
        if len(self.metadata) > MAX_METADATA:
            found["metadata"] = f"{len(self.metadata)} keys; the limit is {MAX_METADATA}"
        for key, value in self.metadata.items():
            if not 0 < len(key) <= MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE or not _text(key + value):
                found["metadata"] = (
                    f"keys must be text of 1 to {MAX_METADATA_KEY} characters, values of up to {MAX_METADATA_VALUE}"
                )
        return found


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """`bytes` is the size of the data, `digest` the text of its digest, `created` in seconds since the epoch. The
    others are as in `Description`.
    """

    name: str
    bytes: int
    created: float
    digest: str
    tokens: int = 0
    model: str = ""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A snapshot, and the key of its data."""

    info: SnapshotInfo
    data: str

    def encode(self) -> bytes:
        """UTF-8 JSON. The description has been checked."""
        return _encoded({"format": FORMAT, **_values(self.info), "data": self.data})


def decode(content: bytes, name: str) -> Entry:
    """The entry that UTF-8 JSON holds; `name` is for messages. Raises DataLoss."""
    try:
        if len(content) > MAX_ENTRY:
            raise ValueError(f"more than {MAX_ENTRY} bytes")
        value = json.loads(content.decode())
        if not isinstance(value, dict) or _take(value, "format", int) != FORMAT:
            raise ValueError("another format")
        info = SnapshotInfo(
            name=_take(value, "name", str),
            bytes=_take(value, "bytes", int),
            created=float(_take(value, "created", (int, float))),
            digest=_take(value, "digest", str),
            tokens=_take(value, "tokens", int),
            model=_take(value, "model", str),
            fingerprint=_take(value, "fingerprint", dict),
            metadata=_take(value, "metadata", dict),
        )
        data = _take(value, "data", str)
        _check(info, data)
    except (ValueError, RecursionError, OverflowError, InvalidRequest) as error:
        raise damaged(name, f"its entry: {error}") from None
    return Entry(info, data)


def damaged(name: str, problem: str) -> DataLoss:
    return DataLoss(f"snapshot {name} is damaged: {problem}", reason="SNAPSHOT_DAMAGED", name=name)


def is_data_key(key: str) -> bool:
    return _DATA_KEY.fullmatch(key) is not None


def _check(info: SnapshotInfo, data: str) -> None:
    check_name(info.name)
    digest_name(info.digest)
    if not all(isinstance(value, str) for value in info.metadata.values()):
        raise ValueError("metadata is no text")
    Description(info.tokens, info.model, info.fingerprint, info.metadata).check()
    if info.bytes < 0 or not 0 <= info.created < _END_OF_TIME or not is_data_key(data):
        raise ValueError(f"{info.bytes} bytes of data {data[:64]!r} created at {info.created}")


def _take(value: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    found = value.get(key)
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ValueError(f"{key} is missing or of another type")
    return found


def _values(item: Description | SnapshotInfo) -> dict[str, Any]:
    """Mappings of any kind as the dicts that JSON takes."""
    values = {attribute.name: getattr(item, attribute.name) for attribute in fields(item)}
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _text(value: str) -> bool:
    """Whether UTF-8 has bytes for it, which it does not for halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
