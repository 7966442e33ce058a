"""Finds the end of a llama.cpp payload, which has no length of its own, and what is in it.

A payload does not tell how to read it, so all readings that may hold are followed at once over the same bytes, each
from field to field without keeping what it skips. All but a few are refuted by the first cells or tensors. The rest
differ in where they end: the right one ends where the bytes end, or where a section begins. A section of someone newer
is known by a magic that is no small number with a flipped bit: what follows a wrong end is a count or a type.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from service.state.errors import PayloadError
from service.state.grammar import Ask, Grammar, Request, Variant
from service.state.layout import LIMITS, SECTIONS, Limits
from service.state.memory import CacheKind, MemoryKind, PayloadSummary

_EXTENSIONS = (0, 12, 8)
"""Bytes behind a cell's head: none; 2D position and token (M-RoPE, n-gram embeddings); as older versions wrote it."""
_AHEAD = 4
_MAGICS = tuple(magic.to_bytes(_AHEAD, "little") for magic in SECTIONS)


def parse_payload(
    data: bytes | memoryview,
    *,
    version: int,
    kind: MemoryKind | None = None,
    partial: bool = False,
    layers: int | None = None,
    limits: Limits = LIMITS,
) -> PayloadSummary:
    """What is in a payload that takes all of `data`. The rest is as for PayloadWalker. Raises PayloadError."""
    walker = PayloadWalker(version=version, kind=kind, partial=partial, layers=layers, bounded=True, limits=limits)
    walker.feed(memoryview(data))
    return walker.finish()


class PayloadWalker:
    """Follows a payload that comes in pieces.

    `version` is the state version of the image. `kind` is None where it is not known. `partial`: written with
    PARTIAL_ONLY. `layers` is the number of layers of the model, if known: a recurrent cache must have that many, an
    attention cache at most. `bounded`: the payload ends where the bytes end, not where a section begins.

    `feed` and `finish` raise PayloadError.
    """

    def __init__(
        self,
        *,
        version: int,
        kind: MemoryKind | None = None,
        partial: bool = False,
        layers: int | None = None,
        bounded: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        self._bounded = bounded
        self._fed = 0
        self._readings = [_Reading(Grammar(variant, version, layers, limits)) for variant in _variants(kind, partial)]
        self._shelved: _Reading | None = None
        self._error: PayloadError | None = None
        self._fields = 0
        self.summary: PayloadSummary | None = None
        """Set as soon as the end is known; it may lie before the last bytes fed."""
        self.follows = b""
        """The 4 bytes that follow; fewer where the bytes ended."""

    @property
    def open_bytes(self) -> int:
        """How many of the last bytes fed may belong to what follows; less than 4."""
        return max((len(reading.ahead) for reading in self._readings), default=0)

    def feed(self, data: memoryview) -> None:
        """Once `summary` is set, further bytes are not looked at."""
        if self.summary is not None:
            return
        for reading in self._readings:
            reading.feed(data)
        self._sort_out()
        if self.summary is None and not self._readings:
            self._settle(self._shelved)

    def finish(self) -> PayloadSummary:
        """What was in the payload, now that no bytes follow."""
        for reading in self._readings:
            reading.finish()
        self._sort_out(final=True)
        ended = [reading for reading in self._readings if reading.summary is not None]
        exact = [reading for reading in ended if not reading.ahead]
        if self.summary is None:
            self._settle(next(iter(exact or ended), self._shelved))
        assert self.summary is not None
        return self.summary

    def _sort_out(self, *, final: bool = False) -> None:
        """Drops refuted readings, and shelves one with the magic of someone newer behind it."""
        kept = []
        for reading in self._readings:
            if reading.summary is not None and reading.ahead:
                self._look_behind(reading, final)
            if self.summary is not None:
                return
            if reading.error is not None:
                self._remember(reading.error, reading.fields)
            elif reading is not self._shelved:
                kept.append(reading)
        self._readings = kept

    def _look_behind(self, reading: _Reading, final: bool) -> None:
        """Decides about a reading that has ended, as far as the bytes behind it are there."""
        ahead = bytes(reading.ahead)
        if self._bounded:
            reading.refute("bytes are left over")
        elif ahead in _MAGICS:
            self._settle(reading)
        elif len(ahead) < _AHEAD:
            if final and not any(magic.startswith(ahead) for magic in _MAGICS):
                reading.refute(f"{len(ahead)} bytes are left over")
        elif ahead.count(0) > 1:
            reading.refute(f"what follows ({ahead.hex(' ')}) begins no section")
        elif self._shelved is None or reading.reached > self._shelved.reached:
            self._shelved = reading

    def _remember(self, error: PayloadError, fields: int) -> None:
        """The best reason is that of the reading that made sense of most."""
        if self._error is None or fields > self._fields:
            self._error, self._fields = error, fields

    def _settle(self, reading: _Reading | None) -> None:
        if reading is None:
            raise self._error or PayloadError("it cannot be read", offset=0)
        self.summary, self.follows = reading.summary, bytes(reading.ahead)
        self._readings = []


class _Reading:
    """One grammar on its way. At most one of `error` and `summary` is set."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._steps = grammar.steps()
        self._held = bytearray()  # not yet enough for the request
        self._skip = 0
        self.fields = 0
        """How many it has seen."""
        self.error: PayloadError | None = None
        self.summary: PayloadSummary | None = None
        self._request: Request = next(self._steps)

    @property
    def reached(self) -> int:
        """Bytes understood."""
        return self._grammar.offset

    @property
    def ahead(self) -> bytes | bytearray:
        """Bytes that were seen but may belong to what follows; all 4 once it has ended."""
        looking = self.summary is not None or (self.error is None and self._request[0] is Ask.PEEK)
        return self._held if looking else b""

    def refute(self, message: str) -> None:
        self.error, self.summary = PayloadError(message, offset=self.reached), None

    def feed(self, data: memoryview) -> None:
        at = 0
        while self.error is None and self.summary is None:
            ask, size, _ = self._request
            if ask is Ask.SKIP:
                at += self._skipped(size, len(data) - at)
                if self._skip < size:
                    return
                self._skip = 0
                self._step(b"")
                continue
            missing = size - len(self._held)
            if missing > 0:
                self._held += data[at : at + missing]
                at = min(at + missing, len(data))
            if len(self._held) < size:
                return
            self._answer(ask, size)
        if self.summary is not None:
            self._held += data[at : at + _AHEAD - len(self._held)]

    def finish(self) -> None:
        """No bytes follow."""
        if self.error is not None or self.summary is not None:
            return
        if self._request[0] is Ask.PEEK:
            self._step(bytes(self._held))
        if self.summary is None and self.error is None:
            self.refute(f"ends in the middle of {self._request[2]}")

    def _skipped(self, size: int, available: int) -> int:
        """Of the bytes at hand, how many were skipped now. What a peek held comes first."""
        held = min(size - self._skip, len(self._held))
        del self._held[:held]
        fresh = min(size - self._skip - held, available)
        self._skip += held + fresh
        return fresh

    def _answer(self, ask: Ask, size: int) -> None:
        data = bytes(self._held[:size])
        if ask is Ask.TAKE:
            del self._held[:size]
        self._step(data)

    def _step(self, data: bytes) -> None:
        self.fields += 1
        try:
            self._request = self._steps.send(data)
        except StopIteration as stop:
            self.summary = stop.value
        except PayloadError as error:
            self.error = error


def _variants(kind: MemoryKind | None, partial: bool) -> Iterator[Variant]:
    """All readings, the likeliest first; none twice."""
    seen = set()
    for memory in MemoryKind if kind is None else (kind,):
        caches = memory.partial if partial else memory.caches
        if caches in seen:
            continue
        seen.add(caches)
        attention = caches.count(CacheKind.ATTENTION)
        for extension in _EXTENSIONS if attention else (0,):
            for values in itertools.product((True, False), repeat=attention):
                yield Variant(memory, caches, extension, values + (False,) * (len(caches) - attention))
