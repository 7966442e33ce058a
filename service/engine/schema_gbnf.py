"""From a JSON schema to a grammar of the JSON texts that are valid under it.

What the grammar allows is valid. It does not allow all that is valid, because a model should neither have to guess
what is meant nor find room to go on for ever:

- No white space but one space after `:` and `,`. Properties stand in the order of the schema.
- Where `type` is missing and other keywords speak of some types, it is one of these types.
- Objects with `properties` have no others, and arrays with `prefixItems` no more items, unless `additionalProperties`
  or `items` say so. Names of other properties differ from those of the schema before their first escape.
- Numbers have a bounded number of digits (`schema_numbers`); `const`, `enum` and strings with a `pattern` are written
  as json.dumps writes them without ASCII escapes.
- `oneOf` is a choice like `anyOf`; only what is valid under several of its branches is allowed and not valid.

Repeating a property's name is not noticed where names are free.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from service.engine.gbnf import (
    EMPTY,
    NEVER,
    Alt,
    Expr,
    Ref,
    Seq,
    Text,
    alt,
    chars,
    difference,
    of,
    optional,
    repeat,
    seq,
)
from service.engine.gbnf_rules import Rules
from service.engine.grammar_text import GrammarError, GrammarLimit
from service.engine.schema import Path, fail
from service.engine.schema_parts import Conjunction, Document, Part, cannot_count, constrains, counts, head_of
from service.engine.schema_values import (
    ARRAY,
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    PLAIN,
    RULES,
    SPACE,
    STRING,
    TYPES,
    VALUE,
    literal,
    number,
    quoted,
    string,
    types_of,
    values_of,
)

MAX_WORK = 25_000
"""What is put together, in all combinations of alternatives; about 40 microseconds each."""
MAX_NAMES = 4096
"""Characters of the names that other properties must not have; each makes a rule."""
_VALUE_WORK = 5
"""What a value costs beside a property or an item of it."""
_LONG = 200
"""Items of a sequence that becomes a rule of its own."""

_UNNAMED = frozenset({"properties", "$defs", "definitions", "anyOf", "oneOf", "allOf", "prefixItems"})


def schema_to_gbnf(schema: dict[str, object] | bool) -> str:
    """GBNF with the start rule `root` for a schema that `check_schema` let pass.

    Raises GrammarError, with the JSON pointer of the place, for what constrains and cannot be expressed, and where no
    value is valid; GrammarLimit where it would become too large.
    """
    text = _Converter(Document(schema)).convert()
    if not text:
        raise GrammarError("no value is valid under this schema")
    return text


class _Converter:
    """Makes a rule of each place in the schema that a value is valid under, or of several that hold together."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.rules = Rules(dict(RULES))
        self.names: dict[frozenset[str], Ref] = {}
        self.texts: dict[int, str] = {}
        self.todo: list[tuple[Ref, Sequence[Part]]] = []
        self.other_names: dict[frozenset[str], Ref] = {}
        self.work = 0

    def convert(self) -> str:
        self.refer([Part(self.document.root, ())], "root")
        while self.todo:
            ref, parts = self.todo.pop()
            self.rules.bodies[ref.name] = self.body(parts)
        return self.rules.write()

    def spend(self, amount: int) -> None:
        self.work += amount
        if self.work > MAX_WORK:
            raise GrammarLimit("with all combinations of its alternatives the schema is too large")

    def refer(self, parts: Iterable[Part], hint: str | None = None) -> Ref:
        """The name of the rule for values under all `parts`."""
        self.spend(1)
        parts = [self.document.shortcut(part) for part in parts] if hint is None else list(parts)
        needed = {self.said(part): part for part in parts if constrains(part)}
        key = frozenset(needed)
        if not needed and hint is None:
            return VALUE
        if key not in self.names:
            found = list(needed.values())
            self.names[key] = self.rules.new(hint or _hint(min((part.path for part in found), key=len)))
            self.todo.append((self.names[key], found))
        return self.names[key]

    def said(self, part: Part) -> str:
        """The text of a part: what says the same in several places is one rule."""
        place = id(part.value)  # the document lives as long as this
        if place not in self.texts:
            self.texts[place] = json.dumps(part.value)
        return self.texts[place]

    def body(self, parts: Sequence[Part]) -> Expr:
        together = Conjunction()
        for part in parts:
            self.document.add(part, together)
        return self.choices(together)

    def choices(self, together: Conjunction) -> Expr:
        if together.impossible:
            return NEVER
        if not together.choices:
            return self.value(together.parts)
        found = []
        for rest, branch, chain in together.branches():
            self.document.add(branch, rest, chain)
            found.append(self.choices(rest))
        return _without_covered(alt(found))

    def value(self, parts: Sequence[Part]) -> Expr:
        self.spend(_VALUE_WORK)
        listed = values_of(parts)
        if listed is not None:
            return self.listed(listed, parts)
        types = types_of(parts)
        if types is None:
            return VALUE
        return alt(self.of_type(kind, parts) for kind in TYPES if kind in types)

    def of_type(self, kind: str, parts: Sequence[Part]) -> Expr:
        match kind:
            case "object":
                return self.object(parts)
            case "array":
                return self.array(parts)
            case "string":
                self.spend(sum(len(str(part.keywords.get("pattern", ""))) for part in parts) // 10)
                return string(parts)
            case "number" | "integer":
                return number(parts, integer=kind == "integer")
        return BOOLEAN if kind == "boolean" else Text(kind)

    def listed(self, values: Sequence[object], parts: Sequence[Part]) -> Expr:
        try:
            found = [literal(value) for value in values]
        except ValueError:
            fail(parts[-1].path, "a listed value is an infinite number")
        self.spend(len(found) + len(str(values)) // 100)
        return alt(found)

    # Objects

    def object(self, parts: Sequence[Part]) -> Expr:
        known = dict.fromkeys(name for part in parts for name in part.mapping("properties"))
        required = dict.fromkeys(name for part in parts for name in part.strings("required"))
        others = [part.at("additionalProperties") for part in parts if "additionalProperties" in part.keywords]
        names = list(dict.fromkeys([*known, *required]))
        least, most = counts(parts, "minProperties", "maxProperties")
        if most is not None and most < max(least, len(required)):
            return NEVER
        if not names:
            return self.map(parts, others, least, most)
        is_open = bool(others) or not known
        if least > max(len(required), 1):
            cannot_count(parts, "minProperties")
        if most is not None and (is_open or most < len(names)):
            cannot_count(parts, "maxProperties")
        extra = NEVER
        if is_open:
            extra = seq(self.other_name(names, parts[0].path), ":", SPACE, self.refer(others))
        members = self.members({name: self.property(parts, name) for name in names}, required, extra)
        return seq("{", members if required or least else optional(members), "}")

    def property(self, parts: Sequence[Part], name: str) -> Expr:
        found = []
        for part in parts:
            if name in part.mapping("properties"):
                found.append(part.at("properties", name))
            elif "additionalProperties" in part.keywords:
                found.append(part.at("additionalProperties"))
        return seq(quoted(name), ":", SPACE, self.refer(found))

    def members(self, pairs: dict[str, Expr], required: Iterable[str], extra: Expr) -> Expr:
        """One or more of `pairs` in their order, with all that are required; `extra` behind them any number of times.

        Built from the end: `tail` is what can begin with one of the pairs behind the current one, or `extra`.
        """
        tail = seq(extra, repeat(seq(",", SPACE, extra), 0, None))
        needed = False  # one of those behind the current one is required
        for name in reversed(pairs):
            if name not in required:
                tail = self.shared(tail, f"from-{name}")
            more = seq(",", SPACE, tail)
            member = seq(pairs[name], more if needed else optional(more))
            if name in required:
                tail, needed = self.shortened(member, f"from-{name}"), True
            else:
                tail = alt([member, tail])
        return tail

    def shortened(self, expr: Expr, hint: str) -> Expr:
        """A name for a long sequence, so that it is not copied for each item in front of it."""
        return self.rules.add(hint, expr) if isinstance(expr, Seq) and len(expr.items) > _LONG else expr

    def map(self, parts: Sequence[Part], others: Sequence[Part], least: int, most: int | None) -> Expr:
        """An object whose names are free."""
        if least > 1:
            cannot_count(parts, "minProperties")  # the same name twice is one property
        if not others and least == 0 and most is None:
            return OBJECT
        member = seq(STRING, ":", SPACE, self.refer(others))
        return seq("{", _listing(member, least, most), "}")

    def other_name(self, names: Sequence[str], path: Path) -> Expr:
        """A name in quotes that is none of `names`. It has no escapes while one of them could still follow."""
        key = frozenset(names)
        if key not in self.other_names:
            total = sum(map(len, key))
            if total > MAX_NAMES:
                message = f"property names beside free ones have {total} characters; at most {MAX_NAMES}"
                fail(path, message, GrammarLimit)
            self.spend(total)
            self.other_names[key] = self._other_name(sorted(key))
        return seq('"', self.other_names[key])

    def _other_name(self, names: list[str]) -> Ref:
        """The rest of a name behind its quote: a rule for each beginning that several names share."""
        first = self.rules.new("other-name")
        todo = [(first, names, 0)]
        while todo:
            ref, group, at = todo.pop()
            following: dict[str, list[str]] = {}
            for name in group:
                if len(name) > at:
                    following.setdefault(name[at], []).append(name)
            other = chars(difference(PLAIN, of("".join(following))))
            branches = [seq(other, Ref("string-end"))]
            if all(len(name) > at for name in group):
                branches.append(Text('"'))
            for character, names in following.items():
                if difference(of(character), PLAIN):
                    continue
                rest = self.rules.new("other-name")
                branches.append(seq(character, rest))
                todo.append((rest, names, at + 1))
            self.rules.bodies[ref.name] = alt(branches)
        return first

    # Arrays

    def array(self, parts: Sequence[Part]) -> Expr:
        heads = [head_of(part) for part in parts]
        rests = [rest for _, rest in heads if rest is not None]
        size = max(len(head) for head, _ in heads)
        least, most = counts(parts, "minItems", "maxItems")
        if size and not rests and least <= size:
            most = size if most is None else min(most, size)
        if most is not None and most < least:
            return NEVER
        if not size:
            is_any = not rests and least == 0 and most is None
            return ARRAY if is_any else seq("[", _listing(self.refer(rests), least, most), "]")
        tail = EMPTY  # what can follow, from the end
        if most is None or most > size:
            more = seq(",", SPACE, self.refer(rests))
            tail = repeat(more, max(least - size, 0), None if most is None else most - size)
        for index in reversed(range(size if most is None else min(size, most))):
            place = [head[index] if index < len(head) else rest for head, rest in heads]
            tail = seq(self.refer(part for part in place if part), tail)
            if index:
                tail = seq(",", SPACE, tail)
                tail = tail if index < least else optional(self.shared(tail, "items"))
        return seq("[", tail if least else optional(tail), "]")

    def shared(self, expr: Expr, hint: str) -> Expr:
        """A name for what is used more than once, or would be nested too deeply."""
        return expr if isinstance(expr, Ref) or expr in (EMPTY, NEVER) else self.rules.add(hint, expr)


def _listing(item: Expr, least: int, most: int | None) -> Expr:
    """`least` to `most` of `item`, separated by commas."""
    if most == 0:
        return EMPTY
    more = seq(",", SPACE, item)
    some = seq(item, repeat(more, max(least - 1, 0), None if most is None else most - 1))
    return some if least else optional(some)


def _without_covered(choice: Expr) -> Expr:
    """The same without branches that another one includes, so that no text has two readings."""
    branches = choice.branches if isinstance(choice, Alt) else (choice,)
    if VALUE in branches:
        return VALUE
    openings = {opening for ref, opening in ((STRING, '"'), (OBJECT, "{"), (ARRAY, "[")) if ref in branches}
    covered = {INTEGER} if NUMBER in branches else set()
    return alt(branch for branch in branches if branch not in covered and _opening(branch) not in openings)


def _opening(expr: Expr) -> str:
    first = expr.items[0] if isinstance(expr, Seq) and expr.items else expr
    return first.text[0] if isinstance(first, Text) else ""


def _hint(path: Path) -> str:
    """A name that says where a rule comes from."""
    words = [str(step) for step in path if isinstance(step, str) and step not in _UNNAMED]
    return "-".join(words[-2:]) or "part"
