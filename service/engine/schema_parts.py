"""JSON schemas as parts that hold together: keywords read with their types, references followed, `allOf` taken apart.

Nothing is dropped that constrains. A keyword that cannot be a grammar is refused; one that JSON Schema does not know
is an annotation, as the specification says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn
from urllib.parse import unquote

from service.engine.grammar_text import GrammarLimit
from service.engine.schema import Path, fail

MAX_CHAIN = 64
"""References and combinations (`allOf`, `anyOf`, `oneOf`) that lead from one to the next."""
MAX_COUNT = 2000
"""Of a minimum or maximum of characters, items or properties; llama.cpp takes no more repetitions."""

_REFUSED = frozenset({"not", "if", "then", "else"}).union(
    {"multipleOf", "divisibleBy", "disallow", "extends", "$dynamicRef", "$recursiveRef"},
    {"uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"},
    {"patternProperties", "propertyNames", "unevaluatedProperties"},
    {"dependentRequired", "dependentSchemas", "dependencies"},
)
_BRANCHES = ("anyOf", "oneOf")
KEYWORDS = {
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
    "array": frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
}
"""Which keywords speak of which type."""
_CONSTRAINING = frozenset({"type", "enum", "const", "$ref", "allOf", *_BRANCHES}).union(*KEYWORDS.values())


@dataclass(frozen=True, slots=True)
class Part:
    """A value of the document and where it stands.

    The methods read a keyword; they raise GrammarError where its value is not what it has to be.
    """

    value: object
    path: Path

    @property
    def keywords(self) -> Mapping[str, object]:
        return self.value if isinstance(self.value, dict) else {}

    def at(self, *steps: str | int) -> Part:
        """What is found below this one, by keys and indices that exist."""
        value = self.value
        for step in steps:
            value = value[step]  # type: ignore[index]
        return Part(value, (*self.path, *steps))

    def mapping(self, keyword: str) -> dict[str, object]:
        found = self.keywords.get(keyword, {})
        if not isinstance(found, dict):
            fail((*self.path, keyword), "this is not an object")
        return found

    def items(self, keyword: str) -> list[object]:
        found = self.keywords.get(keyword, [])
        if not isinstance(found, list):
            fail((*self.path, keyword), "this is not a list")
        return found

    def strings(self, keyword: str) -> list[str]:
        found = self.items(keyword)
        if not all(isinstance(item, str) for item in found):
            fail((*self.path, keyword), "this is not a list of strings")
        return [str(item) for item in found]

    def string(self, keyword: str) -> str:
        found = self.keywords[keyword]
        if not isinstance(found, str):
            fail((*self.path, keyword), "this is not a string")
        return found

    def number(self, keyword: str) -> int | float:
        found = self.keywords[keyword]
        if isinstance(found, int) and not isinstance(found, bool):
            return found
        if not isinstance(found, float) or not math.isfinite(found):
            fail((*self.path, keyword), "this is not a number")
        return int(found) if found.is_integer() else found

    def count(self, keyword: str) -> int:
        found = self.number(keyword)
        if not isinstance(found, int) or found < 0:
            fail((*self.path, keyword), "this is not a whole number of at least 0")
        if found > MAX_COUNT:
            fail(
                (*self.path, keyword), f"{found} is more than a grammar can count to; at most {MAX_COUNT}", GrammarLimit
            )
        return found


@dataclass(slots=True)
class Conjunction:
    """Parts that all hold, and choices of which one branch each holds as well.

    A choice has the branches and the paths that led there, to notice where a branch leads back.
    """

    parts: tuple[Part, ...] = ()
    choices: tuple[tuple[tuple[Part, ...], tuple[Path, ...]], ...] = ()
    seen: frozenset[Path] = frozenset()
    impossible: bool = False

    def branches(self) -> Iterator[tuple[Conjunction, Part, tuple[Path, ...]]]:
        """The first choice made in all ways: what holds without the branch, the branch, and what led to it."""
        (branches, chain), *others = self.choices
        for branch in branches:
            yield replace(self, choices=tuple(others)), branch, chain


@dataclass(frozen=True, slots=True)
class Document:
    """A whole schema, in which references are followed."""

    root: object
    _resolved: dict[str, Part] = field(default_factory=dict)

    def add(self, part: Part, to: Conjunction, chain: tuple[Path, ...] = ()) -> None:
        """Take `part` apart into `to`; `chain` are the paths that led to it without a step into a value."""
        if part.path in chain:
            fail(part.path, "this refers back to itself, so that it says nothing")
        if len(chain) >= MAX_CHAIN:
            fail(part.path, f"more than {MAX_CHAIN} references and combinations lead here", GrammarLimit)
        if part.path in to.seen or part.value is True:
            return
        to.seen |= {part.path}
        if part.value is False:
            to.impossible = True
            return
        if not isinstance(part.value, dict):
            fail(part.path, "this is not a schema: neither an object nor true or false")
        _check(part)
        chain = (*chain, part.path)
        if "$ref" in part.value:
            self.add(self.target(part), to, chain)
        for index in range(len(part.items("allOf"))):
            self.add(part.at("allOf", index), to, chain)
        for keyword in _BRANCHES:
            if keyword in part.value:
                branches = tuple(part.at(keyword, index) for index in range(len(part.items(keyword))))
                to.choices += ((branches, chain),)
        to.parts += (part,)

    def shortcut(self, part: Part) -> Part:
        """Where `part` only leads to: what says the same gets the same path."""
        for _ in range(MAX_CHAIN):
            if _CONSTRAINING.intersection(part.keywords) != {"$ref"} or _REFUSED.intersection(part.keywords):
                break
            part = self.target(part)
        return part

    def target(self, part: Part) -> Part:
        """What `$ref` points to. Raises GrammarError unless it is a JSON pointer (RFC 6901) to something."""
        reference = part.string("$ref")
        place = (*part.path, "$ref")
        if self._has_own_base(part.path):
            fail(place, "a reference inside of a schema with an $id of its own is not supported")
        if reference not in self._resolved:
            self._resolved[reference] = self._resolve(reference, place)
        return self._resolved[reference]

    def _resolve(self, reference: str, place: Path) -> Part:
        pointer = unquote(reference[1:])
        if not reference.startswith("#") or (pointer and not pointer.startswith("/")):
            fail(place, f"{reference!r} is not supported; a reference must be '#' or a JSON pointer, '#/...'")
        found = Part(self.root, ())
        for token in pointer.split("/")[1:]:
            key = token.replace("~1", "/").replace("~0", "~")
            if isinstance(found.value, dict) and key in found.value:
                found = found.at(key)
            elif isinstance(found.value, list) and key.isdecimal() and int(key) < len(found.value):
                found = found.at(int(key))
            else:
                fail(place, f"{reference!r} points nowhere")
        return found

    def _has_own_base(self, path: Path) -> bool:
        """Whether `$id` below the root changes what references mean here."""
        part = Part(self.root, ())
        for step in path:
            part = part.at(step)
            if isinstance(base := part.keywords.get("$id"), str) and not base.startswith("#"):
                return True
        return False


def _check(part: Part) -> None:
    """Refuse keywords that constrain and that no grammar is made of."""
    for keyword in part.keywords:
        if keyword in _REFUSED and not _says_nothing(part, keyword):
            fail((*part.path, keyword), f"{keyword!r} cannot be expressed in a grammar")


def _says_nothing(part: Part, keyword: str) -> bool:
    value = part.keywords[keyword]
    match keyword:
        case "uniqueItems":
            return value is False
        case "then" | "else":
            return "if" not in part.keywords
        case "minContains" | "maxContains":
            return "contains" not in part.keywords
        case "propertyNames" | "unevaluatedProperties" | "unevaluatedItems":
            return value is True or value == {}
        case "patternProperties" | "dependentRequired" | "dependentSchemas" | "dependencies":
            return value == {}
    return False


def constrains(part: Part) -> bool:
    """Whether more than annotations is said."""
    if not isinstance(part.value, dict):
        return part.value is not True
    return bool(_CONSTRAINING.union(_REFUSED).intersection(part.keywords))


def head_of(part: Part) -> tuple[list[Part], Part | None]:
    """The schemas of the first items, and that of the others: of JSON Schema 2020-12, or as they were before it."""
    first, other = "prefixItems", "items"
    if isinstance(part.keywords.get("items"), list):
        first, other = "items", "additionalItems"
    head = [part.at(first, index) for index in range(len(part.items(first)))]
    return head, part.at(other) if other in part.keywords else None


def counts(parts: Sequence[Part], least: str, most: str) -> tuple[int, int | None]:
    """The strongest bounds by two keywords."""
    low = max((part.count(least) for part in parts if least in part.keywords), default=0)
    return low, min((part.count(most) for part in parts if most in part.keywords), default=None)


def cannot_count(parts: Sequence[Part], keyword: str) -> NoReturn:
    place = next(part.path for part in parts if keyword in part.keywords)
    fail((*place, keyword), f"{keyword!r} cannot be expressed beside these properties")
