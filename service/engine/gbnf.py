"""Grammar expressions as values, and as GBNF text.

llama.cpp keeps every way to read the text so far beside the others, so that a choice between things that begin alike
costs at every token. The constructors here (`chars`, `seq`, `repeat`, `alt`) therefore keep expressions in a form in
which alternatives share what they begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

LAST_CODE_POINT = 0x10FFFF
MAX_SHARED = 64
"""Places behind one another where alternatives part; beyond, they stand side by side."""

Ranges = tuple[tuple[int, int], ...]
"""Code points: sorted, disjoint, inclusive ranges."""


@dataclass(frozen=True, slots=True)
class Text:
    """These characters; at least one."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of several."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Ref:
    """What a rule stands for."""

    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several."""

    branches: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times; None: any number."""

    item: Expr
    least: int
    most: int | None


Expr = Text | Chars | Ref | Seq | Alt | Repeat

EMPTY: Expr = Seq(())
NEVER: Expr = Alt(())
"""What no text is."""


def chars(ranges: Ranges) -> Expr:
    if not ranges:
        return NEVER
    (low, high), *more = ranges
    return Text(chr(low)) if low == high and not more else Chars(ranges)


def seq(*items: Expr | str) -> Expr:
    found: list[Expr] = []
    for item in items:
        for part in _parts(item):
            if part == NEVER:
                return NEVER
            if found and isinstance(part, Text) and isinstance(last := found[-1], Text):
                found[-1] = Text(last.text + part.text)
            else:
                found.append(part)
    return found[0] if len(found) == 1 else Seq(tuple(found))


def _parts(item: Expr | str) -> Sequence[Expr]:
    if isinstance(item, str):
        return (Text(item),) if item else ()
    return item.items if isinstance(item, Seq) else (item,)


def repeat(item: Expr, least: int, most: int | None) -> Expr:
    if most == 0 or item == EMPTY or (item == NEVER and least == 0):
        return EMPTY
    if item == NEVER or (least, most) == (1, 1):
        return item
    if isinstance(item, Repeat) and (item.least, item.most) == (0, 1):
        return Repeat(item.item, 0, most)
    if isinstance(item, Repeat) and item.least <= 1 and item.most is None:
        return Repeat(item.item, item.least * least, None)
    return Repeat(item, least, most)


def optional(item: Expr) -> Expr:
    return repeat(item, 0, 1)


def alt(branches: Iterable[Expr | str]) -> Expr:
    """One of `branches`; what several of them begin with is written once."""
    return _join_branches([tuple(_symbols(branch)) for branch in branches], MAX_SHARED)


def _flat(branches: Iterable[Expr]) -> Iterator[Expr]:
    for branch in branches:
        if isinstance(branch, Alt):
            yield from branch.branches
        elif isinstance(branch, Repeat) and (branch.least, branch.most) == (0, 1):
            yield EMPTY
            yield from _flat([branch.item])
        else:
            yield branch


_Symbols = tuple[Expr | str, ...]
"""An expression as a sequence in which a text is its single characters."""


def _symbols(expr: Expr | str) -> Iterator[Expr | str]:
    for part in _parts(expr):
        if isinstance(part, Text):
            yield from part.text
        else:
            yield part


def _join(symbols: _Symbols) -> Expr:
    texts: list[Expr | str] = []
    letters: list[str] = []
    for symbol in symbols:
        if isinstance(symbol, str):
            letters.append(symbol)
        else:
            texts += ["".join(letters), symbol]
            letters = []
    return seq(*texts, "".join(letters))


def _join_branches(branches: Sequence[_Symbols], depth: int) -> Expr:
    branches = [inner for branch in branches for inner in _opened(branch)]
    groups: dict[Expr | str, list[_Symbols]] = {}
    for branch in branches:
        if branch:
            groups.setdefault(branch[0], []).append(branch)
    found: list[Expr] = []
    for group in groups.values():
        if len(group) == 1:
            found.append(_join(group[0]))
        elif depth == 0:
            found += [_join(branch) for branch in dict.fromkeys(group)]
        else:
            shared = _shared(group)
            rest = _join_branches([branch[shared:] for branch in group], depth - 1)
            found.append(seq(_join(group[0][:shared]), rest))
    choice = found[0] if len(found) == 1 else Alt(tuple(found))
    return optional(choice) if len(branches) > sum(map(len, groups.values())) else choice


def _opened(branch: _Symbols) -> list[_Symbols]:
    """The branches of a branch that is itself a choice."""
    if len(branch) == 1 and isinstance(branch[0], Alt | Repeat):
        return [tuple(_symbols(inner)) for inner in _flat(branch)]  # type: ignore[arg-type]
    return [branch]


def _shared(group: Sequence[_Symbols]) -> int:
    """How many symbols all of them begin with."""
    first = group[0]
    for branch in group[1:]:
        same = (place for place, (one, other) in enumerate(zip(first, branch, strict=False)) if one != other)
        first = first[: next(same, len(branch))]
    return len(first)


def rewrite(expr: Expr, change: Callable[[Ref], Expr]) -> Expr:
    """`expr` with every reference replaced; itself where nothing changes."""
    match expr:
        case Ref():
            return change(expr)
        case Seq(items) if (new := [rewrite(item, change) for item in items]) != list(items):
            return seq(*new)
        case Alt(branches) if (new := [rewrite(branch, change) for branch in branches]) != list(branches):
            return alt(new)
        case Repeat(item, least, most) if (changed := rewrite(item, change)) != item:
            return repeat(changed, least, most)
    return expr


def references(expr: Expr) -> Iterator[str]:
    match expr:
        case Ref(name):
            yield name
        case Seq(items) | Alt(items):
            for item in items:
                yield from references(item)
        case Repeat(item):
            yield from references(item)


def rule_text(expr: Expr) -> str:
    """The right side of a rule."""
    if isinstance(expr, Alt):
        return " | ".join(map(_sequence, expr.branches))
    return _sequence(expr) or '""'


def _sequence(expr: Expr) -> str:
    return " ".join(map(_item, _parts(expr)))


def _item(expr: Expr) -> str:
    match expr:
        case Text(text):
            return '"' + "".join(map(_in_literal, text)) + '"'
        case Chars(ranges):
            return _characters(ranges)
        case Ref(name):
            return name
        case Repeat(item, least, most):
            return (f"({_item(item)})" if isinstance(item, Repeat) else _item(item)) + _times(least, most)
    return f"({rule_text(expr)})"


def _times(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    if (least, most) == (0, 1):
        return "?"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def _in_literal(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return _escaped(ord(character)) if character < " " or "\x7f" <= character < "\xa0" else character


def _in_class(code: int) -> str:
    if chr(code) in '"[]\\-':
        return "\\" + chr(code)
    return chr(code) if 0x20 <= code < 0x7F and code != ord("^") else _escaped(code)


def _escaped(code: int) -> str:
    if (short := {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)) is not None:
        return short
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _characters(ranges: Ranges) -> str:
    """A class. Never a complement: llama.cpp finds bytes that begin no character in any of these."""
    parts = (
        _in_class(low) + ("" if low == high else ("-" if high > low + 1 else "") + _in_class(high))
        for low, high in ranges
    )
    return f"[{''.join(parts)}]"


SURROGATES: Ranges = ((0xD800, 0xDFFF),)


def union(*sets: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(part for ranges in sets for part in ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    edges = [-1, *(edge for part in ranges for edge in part), LAST_CODE_POINT + 1]
    gaps = ((low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=True))
    return tuple(gap for gap in gaps if gap[0] <= gap[1])


def difference(ranges: Ranges, others: Ranges) -> Ranges:
    return complement(union(complement(ranges), others))


def of(text: str) -> Ranges:
    """The characters of a text."""
    return union(tuple((ord(character), ord(character)) for character in text))
