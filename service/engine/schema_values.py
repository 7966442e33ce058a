"""Values without structure under a JSON schema: which types there are, listed values, strings and numbers."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from service.engine.gbnf import SURROGATES, Expr, Ref, alt, chars, complement, of, optional, repeat, seq, union
from service.engine.grammar_text import GrammarLimit
from service.engine.schema import Path, fail
from service.engine.schema_numbers import MAX_DIGITS, any_integer, any_number, integers, numbers
from service.engine.schema_parts import KEYWORDS, Part
from service.engine.schema_pattern import FORMATS, Pattern, PatternError, known_format, parse

SPACE, CHAR, STRING, VALUE = Ref("space"), Ref("char"), Ref("string"), Ref("value")
OBJECT, ARRAY, NUMBER, INTEGER, BOOLEAN = Ref("object"), Ref("array"), Ref("number"), Ref("integer"), Ref("boolean")

PLAIN = complement(union(((0x00, 0x1F), (0x7F, 0x7F)), of('"\\'), SURROGATES))
"""Characters that stand for themselves in JSON strings; U+007F does, too, but no text needs it."""
_HEX = union(of("0123456789"), of("abcdefABCDEF"))


def _hex(digits: str = "") -> Expr:
    return chars(of(digits) if digits else _HEX)


def _escape() -> Expr:
    """What follows a backslash. Surrogates come in pairs, since a pair is one character and half of one is none."""
    pair = seq(
        _hex("dD"), _hex("89abAB"), repeat(_hex(), 2, 2), "\\u", _hex("dD"), _hex("cdefCDEF"), repeat(_hex(), 2, 2)
    )
    low = seq(_hex("dD"), _hex("01234567"), repeat(_hex(), 2, 2))
    other = seq(_hex("0123456789abcefABCEF"), repeat(_hex(), 3, 3))
    return alt([chars(of('"\\/bfnrt')), seq("u", alt([other, low, pair]))])


def _enclosed(opening: str, item: Expr, closing: str) -> Expr:
    return seq(opening, optional(seq(item, repeat(seq(",", SPACE, item), 0, None))), closing)


RULES: dict[str, Expr] = {
    "value": alt([OBJECT, ARRAY, STRING, NUMBER, BOOLEAN, seq("null")]),
    "object": _enclosed("{", Ref("member"), "}"),
    "member": seq(STRING, ":", SPACE, VALUE),
    "array": _enclosed("[", VALUE, "]"),
    "string": seq('"', repeat(CHAR, 0, None), '"'),
    "string-end": seq(repeat(CHAR, 0, None), '"'),
    "char": alt([chars(PLAIN), seq("\\", _escape())]),
    "number": any_number(),
    "integer": any_integer(),
    "boolean": alt(["true", "false"]),
    "space": optional(seq(" ")),
}
"""Rules for any value of a type."""

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def types_of(parts: Sequence[Part]) -> frozenset[str] | None:
    """The types that all parts allow; None where none of them speaks of types. `number` stands without `integer`."""
    found: frozenset[str] | None = None
    for part in parts:
        if "type" in part.keywords:
            types = _types(part)
            found = types if found is None else found & types
    if found is None:
        found = frozenset(
            kind for part in parts for kind, words in KEYWORDS.items() if words.intersection(part.keywords)
        )
        if found == {"string"} and not any(_speaks_of_strings(part) for part in parts):
            found = frozenset()
        return found or None
    return found - {"integer"} if "number" in found else found


def _types(part: Part) -> frozenset[str]:
    listed = part.keywords["type"]
    types = frozenset(part.strings("type") if isinstance(listed, list) else [part.string("type")])
    if unknown := types.difference(TYPES):
        fail((*part.path, "type"), f"there is no type {min(unknown)!r}")
    return types | {"integer"} if "number" in types else types


def _speaks_of_strings(part: Part) -> bool:
    """Not with a `format` that is an annotation, perhaps of numbers."""
    words = KEYWORDS["string"].intersection(part.keywords)
    return bool(words - {"format"}) or ("format" in words and part.string("format") in FORMATS)


# Listed values


def values_of(parts: Sequence[Part]) -> list[object] | None:
    """The values that `enum` and `const` leave, without those that break another keyword; None without these two."""
    found: dict[object, object] | None = None
    for part in parts:
        for keyword in ("enum", "const"):
            if keyword in part.keywords:
                listed = part.items("enum") if keyword == "enum" else [part.keywords["const"]]
                values = {_identity(value): value for value in listed}
                found = values if found is None else {key: found[key] for key in found if key in values}
    if found is None:
        return None
    return [value for value in found.values() if all(_holds(value, part) for part in parts)]


def _identity(value: object) -> object:
    """Equal for values that JSON Schema holds to be equal."""
    if isinstance(value, bool) or value is None:
        return str(value), None
    if isinstance(value, list):
        return "list", tuple(map(_identity, value))
    if isinstance(value, dict):
        return "object", frozenset((key, _identity(item)) for key, item in value.items())
    return value


def _holds(value: object, part: Part) -> bool:
    if "type" in part.keywords and not _types(part).intersection(_types_of_value(value)):
        return False
    kind = _types_of_value(value)[0]
    for keyword in sorted(KEYWORDS.get(kind, frozenset()).intersection(part.keywords) - {"format"}):
        if kind not in ("string", "number") or keyword == "pattern":
            fail((*part.path, keyword), f"{keyword!r} together with enum or const cannot be expressed")
        size: Any = len(value) if isinstance(value, str) else value
        if not _COMPARE[keyword](size, part.number(keyword)):
            return False
    return True


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "minLength": operator.ge,
    "maxLength": operator.le,
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}


def _types_of_value(value: object) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case str():
            return ("string",)
        case list():
            return ("array",)
        case dict():
            return ("object",)
        case float() if not value.is_integer():
            return ("number",)
    return ("number", "integer")


def literal(value: object) -> Expr:
    """A value as compact JSON, perhaps with a space after each `:` and `,`. Raises ValueError for infinite numbers."""
    match value:
        case str():
            return seq(quoted(value))
        case list():
            return seq("[", *_separated([literal(item) for item in value]), "]")
        case dict():
            members = [seq(quoted(key), ":", SPACE, literal(item)) for key, item in value.items()]
            return seq("{", *_separated(members), "}")
    return seq(json.dumps(value, allow_nan=False))


def _separated(items: Sequence[Expr]) -> list[Expr]:
    return [*items[:1], *(seq(",", SPACE, item) for item in items[1:])]


def quoted(text: str) -> str:
    """A JSON string. Only what has to be escaped is."""
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


# Strings


def string(parts: Sequence[Part]) -> Expr:
    least = max((part.count("minLength") for part in parts if "minLength" in part.keywords), default=0)
    most = min((part.count("maxLength") for part in parts if "maxLength" in part.keywords), default=None)
    form, place = _form(parts)
    if form is not None and place is not None:
        try:
            return seq('"', form.within(least, most).grammar(), '"')
        except PatternError as error:
            fail(place.path, str(error))
    if most is None and least == 0:
        return STRING
    return alt([]) if most is not None and most < least else seq('"', repeat(CHAR, least, most), '"')


def _form(parts: Sequence[Part]) -> tuple[Pattern | None, Part | None]:
    """The one pattern or known format that strings have, and where."""
    found: dict[str, tuple[Pattern, Part]] = {}
    for part in parts:
        if "format" in part.keywords and part.string("format") in FORMATS:
            name = part.string("format")
            found[FORMATS[name]] = known_format(name), Part(name, (*part.path, "format"))
        if "pattern" in part.keywords:
            text = part.string("pattern")
            place = Part(text, (*part.path, "pattern"))
            try:
                found[text] = _parsed(text), place
            except PatternError as error:
                fail(place.path, str(error))
    if len(found) > 1:
        fail(list(found.values())[-1][1].path, "more than one pattern or format for a string cannot be expressed")
    return next(iter(found.values()), (None, None))


_parsed = lru_cache(maxsize=256)(parse)


# Numbers


def number(parts: Sequence[Part], *, integer: bool) -> Expr:
    low = _bound(parts, "minimum", "exclusiveMinimum", 1)
    high = _bound(parts, "maximum", "exclusiveMaximum", -1)
    if low is None and high is None:
        return INTEGER if integer else NUMBER
    if integer:
        return integers(low.inside(1) if low else None, high.inside(-1) if high else None)
    try:
        return numbers(low.whole() if low else None, high.whole() if high else None)
    except ValueError as error:
        fail(parts[0].path, str(error), GrammarLimit)


@dataclass(frozen=True, slots=True)
class _Bound:
    value: int | float
    allowed: bool
    path: Path

    def inside(self, sign: int) -> int:
        """The first integer in the direction of `sign` that is within."""
        if sign > 0:
            return math.ceil(self.value) if self.allowed else math.floor(self.value) + 1
        return math.floor(self.value) if self.allowed else math.ceil(self.value) - 1

    def whole(self) -> tuple[int, bool]:
        if not isinstance(self.value, int):
            fail(self.path, "a bound of numbers that are no integers must be a whole number to be expressed")
        return self.value, self.allowed


def _bound(parts: Sequence[Part], inclusive: str, exclusive: str, sign: int) -> _Bound | None:
    """The strongest lower (`sign` 1) or upper (-1) bound."""
    found = [
        _Bound(part.number(keyword), keyword == inclusive, (*part.path, keyword))
        for part in parts
        for keyword in (inclusive, exclusive)
        if keyword in part.keywords
    ]
    for bound in found:
        if abs(bound.value) >= 10**MAX_DIGITS:
            fail(bound.path, f"a bound can have at most {MAX_DIGITS} digits", GrammarLimit)
    return max(found, key=lambda bound: (bound.value * sign, not bound.allowed), default=None)
