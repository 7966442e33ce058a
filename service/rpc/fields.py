"""Reading a message field by field: defaults where nothing was sent, and a violation for each bad value."""

from __future__ import annotations

import math
from collections.abc import Sequence

from google.protobuf.message import Message

from service.errors import FieldViolation, InvalidRequest


class Fields:
    """Collects what is wrong with a request; `check` raises it all at once."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    def refuse(self, field: str, description: str) -> None:
        self._violations.append(FieldViolation(field, description))

    def check(self) -> None:
        """Raise InvalidRequest where anything was refused."""
        if self._violations:
            raise InvalidRequest(*self._violations)

    def number(
        self,
        message: Message,
        path: str,
        default: float,
        low: float,
        high: float = math.inf,
        *,
        above: bool = False,
    ) -> float:
        """The optional number at the end of `path`, in [low, high], or with `above` in (low, high]."""
        name = path.rpartition(".")[2]
        if not message.HasField(name):
            return default
        value: float = getattr(message, name)
        if (low < value if above else low <= value) and value <= high and not math.isnan(value):
            return value
        self.refuse(path, f"{value:g} is not in {'(' if above else '['}{low:g}, {high:g}]")
        return default

    def integer(self, message: Message, path: str, default: int, low: int, high: int) -> int:
        """The optional integer at the end of `path`, in [low, high]."""
        name = path.rpartition(".")[2]
        if not message.HasField(name):
            return default
        value: int = getattr(message, name)
        if low <= value <= high:
            return value
        self.refuse(path, f"{value} is not in [{low}, {high}]")
        return default

    def strings(self, values: Sequence[str], path: str, most: int, longest: int) -> tuple[str, ...]:
        """At most `most` strings of 1 to `longest` bytes each."""
        if len(values) > most:
            self.refuse(path, f"{len(values)} strings; at most {most}")
            return ()
        for index, value in enumerate(values):
            size = len(value.encode())
            if not 1 <= size <= longest:
                self.refuse(f"{path}[{index}]", f"{size} bytes; 1 to {longest}")
        return tuple(values)

    def label(self, message: Message, path: str, longest: int) -> str | None:
        """The optional string at the end of `path`, of 1 to `longest` bytes."""
        name = path.rpartition(".")[2]
        if not message.HasField(name):
            return None
        value: str = getattr(message, name)
        size = len(value.encode())
        if not 1 <= size <= longest:
            self.refuse(path, f"{size} bytes; 1 to {longest}")
        return value
