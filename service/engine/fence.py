"""Keeps control tokens in callers' text apart from those of a chat template.

Callers' text is marked before a template inserts it: behind every character of it that begins a control token, and
behind its first and last character if these could complete one together with the text around. The mark is a
noncharacter, so the template treats it like a letter of the text: trimming, splitting at line ends and JSON leave it
where it is (and white space at the end stays if it could begin a control token, which no known model has). In the
result, a control token with a marked character in it is not the template's.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

MARK = "\ufdd0"
"""Removed from callers' text first."""
_RUNS = re.compile(rb"\x00+|\x01+")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. Control tokens are recognised in it if it is `special`."""

    text: str
    special: bool


class Fence:
    """Marks texts, and splits what became of them. `tokens` are the texts of control tokens."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = frozenset(token for token in tokens if token)
        self._lengths = sorted({len(token) for token in self._tokens})
        self._start = re.compile(f"(?={_any_of(self._tokens)})" if self._tokens else r"(?!)")
        self._heads = frozenset(token[:end] for token in self._tokens for end in range(1, len(token)))
        self._tails = frozenset(token[start:] for token in self._tokens for start in range(1, len(token)))
        self._pairs = frozenset(t[at : at + n] for t in self._tokens for at in range(len(t)) for n in (1, 2))

    @staticmethod
    def unmark(text: str) -> str:
        return text.replace(MARK, "")

    def mark(self, text: str, *, ends: bool = True) -> str:
        """`text` with marks. Without `ends`, its first and last character may be part of a token around it."""
        text = self.unmark(text)
        places = {found.start() for found in self._start.finditer(text)}
        if ends:
            places.update(self._loose_ends(text))
        bounds = [0, *(place + 1 for place in sorted(places)), len(text)]
        return MARK.join(text[start:end] for start, end in pairwise(bounds))

    def split(self, marked: str) -> tuple[Segment, ...]:
        """The text without marks, in consecutive pieces that are not empty.

        No special piece has a control token in it, overlapping or not, that contains a marked character. Every other
        control token is whole and in a special piece.
        """
        parts = marked.split(MARK)
        text = "".join(parts)
        if len(parts) == 1:
            return (Segment(text, special=True),) if text else ()
        ours = [end - 1 for end in accumulate(len(part) for part in parts[:-1])]
        plain = bytearray(len(text))
        templates = []
        for start, end in self._occurrences(text):
            next_ours = bisect_left(ours, start)
            if next_ours < len(ours) and ours[next_ours] < end:
                plain[start:end] = b"\x01" * (end - start)
            else:
                templates.append((start, end))
        # where tokens overlap, cutting at the template's one also breaks the other
        for start, end in templates:
            plain[start:end] = bytes(end - start)
        return tuple(
            Segment(text[run.start() : run.end()], special=plain[run.start()] == 0) for run in _RUNS.finditer(plain)
        )

    def _occurrences(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of every control token in `text`, overlapping ones as well."""
        for found in self._start.finditer(text):
            start = found.start()
            for length in self._lengths:
                if text[start : start + length] in self._tokens:
                    yield start, start + length

    def _loose_ends(self, text: str) -> Iterator[int]:
        """The first and the last character, as the text is and as it is when trimmed, if they could be in a token."""
        longest = self._lengths[-1] if self._lengths else 0
        left = len(text) - len(text.lstrip())
        for start, end in {(0, len(text)), (left, len(text.rstrip()))}:
            part = text[start:end]
            inside = len(part) < longest and self._may_be_inside(part)
            sizes = range(1, min(len(part) + 1, longest))
            if inside or any(part[:size] in self._tails for size in sizes):
                yield start
            if inside or any(part[-size:] in self._heads for size in sizes):
                yield end - 1

    def _may_be_inside(self, part: str) -> bool:
        """Whether each two neighbours of `part` are in some token: more than needed, but quick."""
        return bool(part) and all(part[at : at + 2] in self._pairs for at in range(max(len(part) - 1, 1)))


def _any_of(words: Iterable[str]) -> str:
    """A regular expression that matches where one of `words` begins (it may stop at the shortest).

    It is a tree by characters, so that its time does not grow with the number of words: models have thousands.
    """
    prefix = ""
    while True:
        rests: dict[str, list[str]] = {}
        for word in words:
            if not word:
                return prefix
            rests.setdefault(word[0], []).append(word[1:])
        if len(rests) > 1:
            branches = (re.escape(first) + _any_of(rest) for first, rest in rests.items())
            return f"{prefix}(?:{'|'.join(branches)})"
        ((first, words),) = rests.items()
        prefix += re.escape(first)
