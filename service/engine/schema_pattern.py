"""Regular expressions (ECMA-262, as JSON Schema wants them) as grammars of JSON strings.

Only what describes the whole string can be a grammar: alternatives that each begin with `^` and end with `$`. Known:
characters, classes, `\\d \\w \\s` and their complements, `.`, groups, `* + ? {m,n}` (lazy or not), `|`. Classes hold to
what ECMA-262 and other dialects agree on: `\\s` is white space of ASCII, `\\S` nothing that is white space in Unicode.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NoReturn

from service.engine.gbnf import (
    LAST_CODE_POINT,
    SURROGATES,
    Expr,
    Ranges,
    alt,
    chars,
    complement,
    difference,
    of,
    repeat,
    seq,
    union,
)

MAX_LENGTH = 2048
"""Characters of a pattern."""
MAX_NESTING = 64
"""Groups in one another."""
MAX_TIMES = 2000
"""Repetitions that llama.cpp takes (its MAX_REPETITION_THRESHOLD)."""

_DAY = r"(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])"
_LEAP = r"\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00"
_DATE = rf"(\d{{4}}-({_DAY})|({_LEAP})-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}
"""`format`s that are more than annotations (RFC 3339, RFC 4122), as patterns."""

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD = union(_DIGIT, ((0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_ANY_SPACE = union(
    _SPACE, ((0x1C, 0x1F),), of("\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), ((0x2000, 0x200A),)
)
_SETS = {
    "d": _DIGIT,
    "D": complement(_DIGIT),
    "w": _WORD,
    "W": complement(_WORD),
    "s": _SPACE,
    "S": complement(_ANY_SPACE),
}
_DOT = complement(of("\n\r\u2028\u2029"))
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_QUANTIFIER = re.compile(r"[*+?]|\{(?P<least>[0-9]+)(?:(?P<comma>,)(?P<most>[0-9]*))?\}")
_CODE = re.compile(
    r"u[dD](?P<high>[89abAB][0-9a-fA-F]{2})\\u[dD](?P<low>[c-fC-F][0-9a-fA-F]{2})"
    r"|x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|u\{(?P<long>[0-9a-fA-F]{1,8})\}|c(?P<control>[a-zA-Z])|0(?![0-9])"
)

_SHORT_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_NOT_PLAIN = union(((0x00, 0x1F),), of('"\\'), SURROGATES)
_HEX = "0123456789abcdef"


class PatternError(ValueError):
    """A pattern that is none, or that cannot be a grammar."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One character of `ranges`, or all of `items`, or one of `branches`, `least` to `most` times.

    A node has one of the three; `items` may be empty.
    """

    ranges: Ranges | None = None
    items: tuple[Pattern, ...] = ()
    branches: tuple[Pattern, ...] = ()
    least: int = 1
    most: int | None = 1

    @property
    def lengths(self) -> tuple[int, int | None]:
        """The fewest and the most characters that match; None where there is no most."""
        if self.ranges is not None:
            return self.least, self.most
        parts = [part.lengths for part in self.branches or self.items]
        highs = [high for _, high in parts if high is not None]
        combine = (min, max) if self.branches else (sum, sum)
        low = combine[0](low for low, _ in parts)
        high = combine[1](highs) if len(highs) == len(parts) else None
        if self.most is None or high is None:
            return low * self.least, 0 if high == 0 or self.most == 0 else None
        return low * self.least, high * self.most

    def within(self, least: int, most: int | None) -> Pattern:
        """What of it has `least` to `most` characters. Raises PatternError where that is more than new counts."""
        low, high = self.lengths
        if low >= least and (most is None or (high is not None and high <= most)):
            return self
        items = self.items if (self.least, self.most) == (1, 1) and self.items else (self,)
        variable = [place for place, item in enumerate(items) if item.lengths[0] != item.lengths[1]]
        if len(variable) != 1 or items[variable[0]].ranges is None:
            raise PatternError("it cannot be combined with this minLength or maxLength; write the lengths into it")
        place = variable[0]
        item = items[place]
        fixed = low - item.least
        most = item.most if most is None else most - fixed if item.most is None else min(item.most, most - fixed)
        narrow = replace(item, least=max(item.least, least - fixed), most=most)
        if most is not None and most < narrow.least:
            raise PatternError("nothing that matches it has the length of this minLength or maxLength")
        return Pattern(items=(*items[:place], narrow, *items[place + 1 :]))

    def grammar(self) -> Expr:
        """The insides of JSON strings that match."""
        if self.ranges is not None:
            once = in_string(self.ranges)
        elif self.branches:
            once = alt(branch.grammar() for branch in self.branches)
        else:
            once = seq(*(item.grammar() for item in self.items))
        return repeat(once, self.least, self.most)


def in_string(ranges: Ranges) -> Expr:
    """One of these characters as json.dumps writes it into a string."""
    short = {ord(character): letter for character, letter in _SHORT_ESCAPES.items()}
    escaped = [
        code for low, high in ranges for code in range(low, min(high, ord("\\")) + 1) if code < 0x20 or code in short
    ]
    letters = of("".join(short[code] for code in escaped if code in short))
    others = [code for code in escaped if code not in short]
    numbers = (
        seq(f"\\u00{high}", chars(of("".join(_HEX[code % 16] for code in others if code // 16 == high))))
        for high in range(2)
    )
    return alt([chars(difference(ranges, _NOT_PLAIN)), seq("\\", chars(letters)), *numbers])


def parse(text: str) -> Pattern:
    """Raises PatternError."""
    if len(text) > MAX_LENGTH:
        raise PatternError(f"it has {len(text)} characters; at most {MAX_LENGTH}")
    return _Parser(text).whole()


@cache
def known_format(name: str) -> Pattern:
    return parse(FORMATS[name])


def _choice(branches: Sequence[Pattern]) -> Pattern:
    """One of several, those that are single characters as one set."""
    single = [branch for branch in branches if branch.ranges is not None and (branch.least, branch.most) == (1, 1)]
    others = [branch for branch in branches if branch not in single]
    if single:
        others.append(Pattern(union(*(branch.ranges for branch in single if branch.ranges))))
    return others[0] if len(others) == 1 else Pattern(branches=tuple(others))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise PatternError(f"{message}, at character {(self.at if at is None else at) + 1} of the pattern")

    def take(self, text: str) -> bool:
        if found := self.text.startswith(text, self.at):
            self.at += len(text)
        return found

    def whole(self) -> Pattern:
        branches = []
        while True:
            if not self.take("^"):
                self.fail("expected '^': only a pattern for the whole text, ^...$, can be a grammar")
            branches.append(self.sequence(0))
            if not self.take("$"):
                self.fail("expected '$': only a pattern for the whole text, ^...$, can be a grammar")
            if self.at == len(self.text):
                return _choice(branches)
            if not self.take("|"):
                self.fail("nothing can follow '$'")

    def sequence(self, depth: int) -> Pattern:
        items = []
        while (
            self.at < len(self.text)
            and self.text[self.at] not in "|)"
            and not (self.text[self.at] == "$" and not depth)
        ):
            items.append(self.quantified(self.atom(depth)))
        if self.text.startswith(")", self.at) and not depth:
            self.fail("')' closes nothing")
        return items[0] if len(items) == 1 else Pattern(items=tuple(items))

    def atom(self, depth: int) -> Pattern:
        start, character = self.at, self.text[self.at]
        self.at += 1
        if character == "(":
            return self.group(depth + 1, start)
        if character == "[":
            return Pattern(self.characters(start))
        if character == ".":
            return Pattern(_DOT)
        if character == "\\":
            return Pattern(self.escape())
        if character in "^$":
            self.fail(f"{character!r} can only be at the ends of the pattern", start)
        if character in "*+?{":
            self.fail(f"{character!r} repeats nothing", start)
        if character in "]}":
            self.fail(f"{character!r} closes nothing; write \\{character}", start)
        return Pattern(of(character))

    def group(self, depth: int, start: int) -> Pattern:
        if depth > MAX_NESTING:
            self.fail(f"groups are nested deeper than {MAX_NESTING}", start)
        if self.take("?") and not self.take(":"):
            name = re.compile(r"<[a-zA-Z_$][\w$]*>").match(self.text, self.at)
            if not name:
                self.fail("lookaround and flags cannot be a grammar", start)
            self.at = name.end()
        branches = [self.sequence(depth)]
        while self.take("|"):
            branches.append(self.sequence(depth))
        if not self.take(")"):
            self.fail("the group is not closed", start)
        return _choice(branches)

    def quantified(self, item: Pattern) -> Pattern:
        found = _QUANTIFIER.match(self.text, self.at)
        if not found:
            return item
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[0], (0, 0))
        if found["least"]:
            least = most = int(found["least"])
            if found["comma"]:
                most = int(found["most"]) if found["most"] else None
            if max(least, most or 0) > MAX_TIMES:
                self.fail(f"{found[0]}: at most {MAX_TIMES} repetitions")
            if most is not None and most < least:
                self.fail(f"{found[0]}: the maximum is below the minimum")
        self.at = found.end()
        self.take("?")  # as few as possible: the same texts
        if _QUANTIFIER.match(self.text, self.at):
            self.fail("what is repeated is repeated again; write a group")
        if (item.least, item.most) == (1, 1):
            return replace(item, least=least, most=most)
        return Pattern(items=(item,), least=least, most=most)

    def characters(self, start: int) -> Ranges:
        """The rest of a class."""
        negated = self.take("^")
        parts: list[Ranges] = []
        while not self.take("]"):
            place = self.at
            low = self.class_atom(start)
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at) and _single(low):
                self.at += 1
                high = self.class_atom(start)
                if not _single(high):
                    self.fail("the range ends in a class", place)
                if high < low:
                    self.fail("the range ends before it begins", place)
                low = ((low[0][0], high[0][1]),)
            parts.append(low)
        if not parts:
            self.fail("the class is empty", start)
        return complement(union(*parts)) if negated else union(*parts)

    def class_atom(self, start: int) -> Ranges:
        if self.at >= len(self.text):
            self.fail("the class is not closed", start)
        character = self.text[self.at]
        self.at += 1
        if character != "\\":
            return of(character)
        return of("\b") if self.take("b") else self.escape()

    def escape(self) -> Ranges:
        """What follows a backslash."""
        start, letter = self.at - 1, self.text[self.at : self.at + 1]
        if code := _CODE.match(self.text, self.at):
            self.at = code.end()
            return self.code(code, start)
        self.at += 1
        if letter in _SETS:
            return _SETS[letter]
        if letter in _CONTROLS:
            return of(chr(_CONTROLS[letter]))
        if not letter or letter.isalnum():
            self.fail(f"\\{letter} cannot be a grammar (known: \\d \\w \\s, \\n and the like, \\xHH, \\uHHHH)", start)
        return of(letter)

    def code(self, found: re.Match[str], start: int) -> Ranges:
        if found["high"]:
            value = 0x10000 + (int(found["high"], 16) - 0x800) * 0x400 + int(found["low"], 16) - 0xC00
        elif found["control"]:
            value = ord(found["control"]) % 32
        else:
            value = int(found["x"] or found["u"] or found["long"] or "0", 16)
        if value > LAST_CODE_POINT:
            self.fail(f"U+{value:X} is no character", start)
        return ((value, value),)


def _single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
