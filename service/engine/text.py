"""From tokens to text that may be sent: whole characters only, and nothing that may yet become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_Utf8 = codecs.getincrementaldecoder("utf-8")


class StopStrings:
    """Finds the first stop string in text that arrives in pieces, and tells how much of its end must wait.

    One Knuth-Morris-Pratt automaton for each string: a character costs a constant time for each, whatever it repeats.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failures(stop)) for stop in stops]
        self._matched = [0] * len(stops)

    def feed(self, text: str) -> tuple[str, int] | None:
        """Take more text. Returns the stop string that ends first (the longest of these) and the index behind it in
        `text`, or None.
        """
        for index, char in enumerate(text):
            met = ""
            for which, (stop, failures) in enumerate(self._stops):
                state = self._matched[which]
                while state and stop[state] != char:
                    state = failures[state - 1]
                state += stop[state] == char
                if state == len(stop):
                    met = max(met, stop, key=len)
                    state = failures[state - 1]
                self._matched[which] = state
            if met:
                return met, index + 1
        return None

    @property
    def waiting(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a stop string."""
        return max(self._matched, default=0)


def _failures(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    failures = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = failures[length - 1]
        length += stop[index] == stop[length]
        failures[index] = length
    return failures


class TextStream:
    """The text of one generation. `stop` is the stop string that was met, or empty."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = _Utf8("replace")
        self._stops = StopStrings(stops) if stops else None
        self._held = ""
        self.stop = ""

    def push(self, piece: bytes) -> str:
        """Take the bytes of a token; returns the text that may be sent now. After a stop string nothing comes."""
        return self._release(self._decoder.decode(piece))

    def finish(self) -> str:
        """The end is reached: returns what was held back; bytes of an unfinished character become U+FFFD."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        if self.stop:
            return ""
        found = self._stops.feed(text)
        text = self._held + text
        if found:
            self.stop, end = found
            end += len(self._held)
            self._held = ""
            return text[: end - len(self.stop)]
        split = len(text) - self._stops.waiting
        self._held = text[split:]
        return text[:split]
