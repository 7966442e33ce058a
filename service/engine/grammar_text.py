"""GBNF at the level of characters: spaces, names, numbers, escapes, and where in the text something is wrong.

The forms are those of `parse_space`, `parse_name`, `parse_int`, `parse_char` and `parse_token` in llama.cpp
(src/llama-grammar.cpp). They are the same on characters as they are there on the bytes of valid UTF-8.
"""

from __future__ import annotations

import re
from typing import NoReturn

MAX_BYTES = 256 * 1024
"""Of the text as UTF-8."""
MAX_NAME = 1024
"""Characters of a rule's name; llama.cpp copies it for every group and repetition in the rule."""
MAX_CLASS = 1024
"""Elements of a character class; each is compared with every token of the vocabulary."""

_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1
_LAST_CODE_POINT = 0x10FFFF

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_DIGITS = re.compile(r"[0-9]+")
_PLAIN = re.compile(r'[^"\\]+')
_LINE_END = re.compile(r"\r\n|\r|\n|\Z")
_HEX = {"x": re.compile(r"[0-9a-fA-F]{2}"), "u": re.compile(r"[0-9a-fA-F]{4}"), "U": re.compile(r"[0-9a-fA-F]{8}")}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_UNUSABLE = re.compile("[\0\ud800-\udfff]")


class GrammarError(ValueError):
    """A grammar or schema that cannot be used. `line` and `column` (characters) begin at 1; 0 where there is none."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(f"line {line}, column {column}: {message}" if line else message)
        self.message = message
        self.line = line
        self.column = column


class GrammarLimit(GrammarError):
    """Beyond a limit: llama.cpp may accept it, but it could hang, crash, or find no token that fits."""


class Scanner:
    """A text and a place in it, `at`. Its methods read one form, move behind it, and raise GrammarError at its place.

    Raises GrammarLimit for a text that is too long, or that llama.cpp could not see as a whole.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_BYTES:
            raise GrammarLimit(f"the text has {size} bytes; at most {MAX_BYTES}")
        if bad := _UNUSABLE.search(text):
            self.fail(f"U+{ord(bad[0]):04X} cannot be part of the text", bad.start(), GrammarLimit)

    def fail(self, message: str, offset: int | None = None, kind: type[GrammarError] = GrammarError) -> NoReturn:
        """Raise `kind` with the line and column of the character at `offset`, by default the current place."""
        offset = self.at if offset is None else offset
        raise kind(message, self.text.count("\n", 0, offset) + 1, offset - self.text.rfind("\n", 0, offset))

    def peek(self) -> str:
        """The current character; empty at the end."""
        return self.text[self.at : self.at + 1]

    def skip(self, *, lines: bool) -> None:
        """Go over spaces and comments, and with `lines` over line ends."""
        found = (_SPACE_AND_LINES if lines else _SPACE).match(self.text, self.at)
        self.at = found.end() if found else self.at

    def take(self, expected: str) -> None:
        if not self.text.startswith(expected, self.at):
            self.fail(f"expected {expected!r}")
        self.at += len(expected)

    def name(self) -> str:
        """A rule's name: ASCII letters, digits and `-`."""
        name = self._match(_NAME, "expected the name of a rule")
        if len(name) > MAX_NAME:
            self.fail(f"the name has {len(name)} characters; at most {MAX_NAME}", self.at - len(name), GrammarLimit)
        return name

    def at_name(self) -> bool:
        return _NAME.match(self.text, self.at) is not None

    def number(self) -> int:
        start = self.at
        digits = self._match(_DIGITS, "expected a number").lstrip("0") or "0"
        if len(digits) > len(str(_UINT64_MAX)) or int(digits) > _UINT64_MAX:
            self.fail("the number is too large", start)
        return int(digits)

    def line_end(self) -> None:
        self._match(_LINE_END, "expected an item, '|' or the end of the line")

    def literal(self) -> int:
        """A string in double quotes. Returns its length in characters; these are what a token has to spell."""
        start, length = self.at, 0
        self.take('"')
        while (character := self.peek()) != '"':
            if not character:
                self.fail("the string is not closed: expected '\"'", start)
            if plain := _PLAIN.match(self.text, self.at):
                self.at, length = plain.end(), length + len(plain[0])
                continue
            place, code = self.at, self.character()
            if code == 0 or 0xD800 <= code <= 0xDFFF:
                self.fail(f"no token spells U+{code:04X}", place, GrammarLimit)
            length += 1
        self.at += 1
        return length

    def characters(self) -> int:
        """A class such as `[^a-z_]`. Returns how many elements llama.cpp makes of it: 1 a character, 2 a range.

        As there, `-` is itself in front of `]`, and an empty class is an empty sequence.
        """
        start, elements = self.at, 0
        self.take("[")
        self.at += self.peek() == "^"
        while self.peek() != "]":
            place, low = self.at, self.character(start)
            elements += 1
            if self.peek() == "-" and not self.text.startswith("]", self.at + 1):
                self.at += 1
                elements += 1
                if self.character(start) < low:
                    self.fail("the range ends before it begins, so it holds no character", place, GrammarLimit)
        if elements > MAX_CLASS:
            self.fail(f"the class has {elements} elements; at most {MAX_CLASS}", start, GrammarLimit)
        self.at += 1
        return elements

    def character(self, start: int | None = None) -> int:
        """One character, perhaps escaped, and its code point. At the end of the text the error is at `start`."""
        character = self.peek()
        if not character:
            self.fail("unexpected end of the text: expected ']'", start)
        self.at += 1
        if character != "\\":
            return ord(character)
        letter = self.peek()
        self.at += 1
        if letter in _HEX:
            place = self.at - 2
            code = int(self._match(_HEX[letter], f"\\{letter} needs {_HEX[letter].pattern[-2]} hexadecimal digits"), 16)
            if code > _LAST_CODE_POINT:
                self.fail(f"U+{code:X} is no character", place, GrammarLimit)
            return code
        if letter not in _ESCAPES:
            self.fail(
                'unknown escape; known are \\t \\r \\n \\\\ \\" \\[ \\] \\- \\xXX \\uXXXX \\UXXXXXXXX', self.at - 2
            )
        return ord(_ESCAPES[letter])

    def token(self) -> str | None:
        """`<[id]>`, or `<text>`: then the text is returned, angle brackets included."""
        start = self.at
        self.take("<")
        if self.peek() == "[":
            self.at += 1
            place = self.at
            if self.number() > _UINT32_MAX:
                self.fail("the token id is too large", place)
            self.take("]")
            self.take(">")
            return None
        end = self.text.find(">", self.at)
        if end < 0:
            self.fail("the token is not closed: expected '>'", start)
        self.at = end + 1
        return self.text[start : self.at]

    def _match(self, form: re.Pattern[str], complaint: str) -> str:
        found = form.match(self.text, self.at)
        if not found:
            self.fail(complaint)
        self.at = found.end()
        return found[0]
