"""Bytes that come in pieces, for a parser written as if they were all there."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable


class Ended(Exception):
    """The bytes ended in the middle of something."""


class Source:
    """Where a parser takes its bytes from; its methods yield when they need more. `offset` counts those taken."""

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()
        self._ended = False
        self.offset = 0

    def add(self, data: memoryview) -> None:
        if len(data):
            self._pieces.append(data)

    def end(self) -> None:
        self._ended = True

    def some(self, most: int | None = None) -> Generator[None, None, memoryview]:
        """The next bytes, at least one and not copied. Empty at the end."""
        while not self._pieces:
            if self._ended:
                return memoryview(b"")
            yield
        piece = self._pieces.popleft()
        if most is not None and len(piece) > most:
            self._pieces.appendleft(piece[most:])
            piece = piece[:most]
        self.offset += len(piece)
        return piece

    def take(self, size: int, what: str) -> Generator[None, None, bytes]:
        """Exactly `size` bytes, joined as they come: what does not come takes no memory. Raises Ended."""
        data = yield from self.at_most(size)
        if len(data) < size:
            raise Ended(f"it ends in the middle of {what}")
        return data

    def at_most(self, size: int) -> Generator[None, None, bytes]:
        """As `take`, but less at the end."""
        joined = bytearray()
        while len(joined) < size:
            piece = yield from self.some(size - len(joined))
            if not len(piece):
                break
            joined += piece
        return bytes(joined)

    def put_back(self, pieces: Iterable[memoryview]) -> None:
        """Pieces that were taken last, in their order."""
        returned = [piece for piece in pieces if len(piece)]
        self._pieces.extendleft(reversed(returned))
        self.offset -= sum(map(len, returned))
