"""A check of JSON schema text before it is turned into GBNF.

`llama_cpp.llama_grammar.json_schema_to_gbnf` does the turning. It takes what it gets: it writes repetitions out,
follows a reference again and again where the name of its target needs escaping, and loops for ever on some patterns.
This check bounds all of that. A schema that passes may still be refused by the converter (it knows less than JSON
schema does, and raises nearly anything: AssertionError, AttributeError, IndexError, KeyError, RecursionError,
TypeError, ValueError), and what comes out still has to pass `check_gbnf`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonschema.validators import Draft202012Validator, validator_for

from service.engine.grammar_text import GrammarError, GrammarLimit

MAX_BYTES = 256 * 1024
"""Of the text as UTF-8."""
MAX_DEPTH = 64
"""Of objects and lists in one another."""
MAX_CONTAINERS = 2000
"""Objects and lists, also after references are followed as often as the converter follows them."""
MAX_ITEMS = 1024
"""Of one list; with more choices than that a grammar is too slow to be used at every token."""
MAX_PATTERN = 2048
"""Characters of a regular expression; the converter's time grows with the square."""
MAX_OPTIONAL = 500
"""How far a maximum may be above its minimum: the converter nests a group for each, see MAX_NESTING of grammars."""
MAX_WRITTEN = 4 * 1024 * 1024
"""Characters that the converter may write out for repetitions, by a generous estimate."""
MAX_PROBES = 5_000_000
"""Tries to find a free name for a rule, about 0.3 microseconds each."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_RANGES = (("minLength", "maxLength"), ("minItems", "maxItems"))
_SHOWN = 200

# The lexical parts of a pattern as the converter sees them. It does not move past a closing bracket without an
# opening one, which is how it loops for ever.
_PATTERN_PART = re.compile(
    r"\\.?|\[(?:\\.|[^\]\\])*\\?\]?|\{(?P<counts>[^}]*)\}?|(?P<stray>[\]}])|[^\\\[{\]}]+", re.DOTALL
)
# The converter remembers a reference by the last part of its path, if that is the name of a rule in the end: it must
# need no escaping, and not be one of the converter's own (PRIMITIVE_RULES, STRING_FORMAT_RULES, RESERVED_NAMES).
_REMEMBERED_NAME = re.compile(
    r"(?!(?:root|dot|boolean|(?:decimal|integral)-part|number|integer|value|object|array|uuid|char|string|null"
    r"|(?:date|time|date-time)(?:-string)?)\Z)[a-zA-Z0-9-]+"
)

_Path = tuple[str | int, ...]


def check_schema(text: str) -> dict[str, object]:
    """The schema in `text`, which holds to its metaschema (`$schema`, by default JSON Schema 2020-12).

    References stay within the document, and the size of what the converter makes of it is bounded. Raises
    GrammarError: with line and column where `text` is no JSON, else with the JSON pointer (RFC 6901) of the place in
    its message; GrammarLimit where a limit is exceeded.
    """
    document = _parse(text)
    _Survey().value(document, ())
    _check_metaschema(document)
    _Expansion(document).check()
    return document


def _parse(text: str) -> dict[str, object]:
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_BYTES:
        raise GrammarLimit(f"the text has {size} bytes; at most {MAX_BYTES}")
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise GrammarError(f"this is no JSON: {error.msg}", error.lineno, error.colno) from None
    except RecursionError:
        raise GrammarLimit(f"objects and lists are nested deeper than {MAX_DEPTH}") from None
    except ValueError:  # from `_refuse_constant`, or from `int` beyond sys.get_int_max_str_digits()
        raise GrammarError("this is no JSON: NaN, Infinity, or a number with thousands of digits") from None
    if not isinstance(document, dict):
        raise GrammarError("a schema must be a JSON object")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _check_metaschema(document: Any) -> None:
    if not isinstance(document.get("$schema", ""), str):
        _fail(("$schema",), "this is not a string")
    kind = validator_for(document, default=Draft202012Validator)
    # no `check_schema`: that also compiles patterns, as Python's own kind of regular expression
    if error := next(kind(kind.META_SCHEMA).iter_errors(document), None):
        _fail(tuple(error.absolute_path), error.message)


def _fail(path: Sequence[str | int], message: str, kind: type[GrammarError] = GrammarError) -> NoReturn:
    pointer = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
    if len(message) > _SHOWN:
        message = message[:_SHOWN] + "..."
    raise kind(f"at {pointer}: {message}" if pointer else message)


class _Survey:
    """Checks every value where it stands. Data (`enum`, `default`) is held to the same rules as schemas, because a
    reference may point into it."""

    def __init__(self) -> None:
        self.containers = 0

    def value(self, value: object, path: _Path) -> None:
        if not isinstance(value, dict | list):
            return
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise GrammarLimit(f"the schema has more than {MAX_CONTAINERS} objects and lists")
        if len(path) >= MAX_DEPTH:
            _fail(path, f"objects and lists are nested deeper than {MAX_DEPTH}", GrammarLimit)
        if isinstance(value, list):
            if len(value) > MAX_ITEMS:
                _fail(path, f"the list has {len(value)} items; at most {MAX_ITEMS}", GrammarLimit)
            for index, item in enumerate(value):
                self.value(item, (*path, index))
            return
        for keyword in _REFERENCES:
            target = value.get(keyword)
            if isinstance(target, str) and not target.startswith("#"):
                _fail((*path, keyword), f"{target!r} leaves the document; a reference must begin with '#'")
        for low, high in _RANGES:
            if _count(value.get(high)) - _count(value.get(low)) > MAX_OPTIONAL:
                _fail((*path, high), f"this is more than {MAX_OPTIONAL} above {low}", GrammarLimit)
        if isinstance(pattern := value.get("pattern"), str):
            _check_pattern(pattern, (*path, "pattern"))
        for key, item in value.items():
            self.value(item, (*path, key))


def _count(value: object) -> int:
    """A keyword's number; 0 where it is none. The sum of many stays an int, however large the numbers are."""
    return int(min(max(value, 0), 2**63)) if isinstance(value, int | float) else 0


def _check_pattern(pattern: str, path: _Path) -> None:
    if len(pattern) > MAX_PATTERN:
        _fail(path, f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN}", GrammarLimit)
    for part in _PATTERN_PART.finditer(pattern[1:-1]):  # without ^ and $
        if part["stray"]:
            _fail(path, f"{part['stray']!r} at character {part.start() + 2} closes nothing; write \\{part['stray']}")
        low, high = _counts(part["counts"])
        if high - low > MAX_OPTIONAL:
            _fail(path, f"{part[0]} spans more than {MAX_OPTIONAL} repetitions", GrammarLimit)


def _counts(text: str | None) -> tuple[int, int]:
    """Minimum and maximum of a quantifier's inside such as `2,5`. (0, 0) for what the converter refuses."""
    try:
        numbers = [int(part) if part.strip() else None for part in (text or "").split(",")]
    except ValueError:
        return 0, 0
    low = numbers[0] or 0
    high = numbers[-1]
    return low, low if high is None else high


class _Expansion:
    """Goes the way of the converter, which is longer than the document where it follows a reference repeatedly."""

    def __init__(self, document: dict[str, object]) -> None:
        self.document = document
        self.visits = 0
        self.written = 0
        self.named = 0
        self.ambiguous = 0
        self.followed: set[str] = set()
        self.open: set[str] = set()

    def check(self) -> None:
        try:
            self.value(self.document, ())
        except RecursionError:
            raise GrammarLimit("the references are nested too deeply") from None
        if self.written > MAX_WRITTEN:
            raise GrammarLimit("the repetitions are too many (minLength, maxLength, minItems, maxItems, pattern)")
        if self.named * (1 + self.ambiguous) > MAX_PROBES:
            raise GrammarLimit("too many properties whose names are not only ASCII letters and digits")

    def value(self, value: object, path: _Path) -> None:
        if isinstance(value, list):
            for index, item in enumerate(value):
                self.value(item, (*path, index))
        if not isinstance(value, dict):
            return
        self.visits += 1
        if self.visits > MAX_CONTAINERS:
            raise GrammarLimit(f"with its references followed the schema has more than {MAX_CONTAINERS} objects")
        self.count(value, path)
        if isinstance(reference := value.get("$ref"), str):
            self.follow(reference, (*path, "$ref"))
        for key, item in value.items():
            if key == "allOf" and isinstance(item, list):
                self.components(item, (*path, key))
            else:
                self.value(item, (*path, key))

    def count(self, schema: dict[str, object], path: _Path) -> None:
        # a repetition writes the name of a rule, which is made of the path, or a part of the pattern
        length = 20 + sum(len(str(part)) + 1 for part in path)
        self.written += length * sum(_count(schema.get(keyword)) for names in _RANGES for keyword in names)
        if isinstance(pattern := schema.get("pattern"), str):
            counts = (max(*_counts(part["counts"]), 0) for part in _PATTERN_PART.finditer(pattern))
            self.written += (length + len(pattern)) * sum(counts)
        if isinstance(properties := schema.get("properties"), dict):
            # each property that may be left out gets a rule for what follows, from each one in front of it
            self.named += len(properties) * (len(properties) + 1)
            self.ambiguous += sum(1 for name in properties if not (name.isascii() and name.isalnum()))

    def follow(self, reference: str, path: _Path) -> None:
        """Once at a time for each reference, and once in all where the converter remembers it."""
        name = reference.rpartition("/")[2]
        if name in self.followed or reference in self.open:
            return
        self.open.add(reference)
        self.value(*self.resolve(reference, path))
        self.open.remove(reference)
        if _REMEMBERED_NAME.fullmatch(name):
            self.followed.add(name)

    def components(self, schemas: list[object], path: _Path) -> None:
        """The parts of `allOf`, whose references the converter replaces by their targets every time."""
        for index, schema in enumerate(schemas):
            part = (*path, index)
            if isinstance(schema, dict) and isinstance(schema.get("anyOf"), list):
                self.components(schema["anyOf"], (*part, "anyOf"))
            elif isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
                self.value(*self.resolve(reference, (*part, "$ref")))
            else:
                self.value(schema, part)

    def resolve(self, reference: str, path: _Path) -> tuple[object, _Path]:
        """The value at a reference, and its path. The converter knows no anchors (`#name`) and no escapes."""
        target: object = self.document
        parts = reference.split("/")[1:]
        for part in parts:
            if isinstance(target, dict) and part in target:
                target = target[part]
            elif isinstance(target, list) and part.isdecimal() and int(part) < len(target):
                target = target[int(part)]
            else:
                _fail(path, f"{reference!r} points nowhere")
        return target, tuple(parts)
