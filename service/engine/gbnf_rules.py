"""The rules of a grammar: what never ends is taken out, what is equal is written once, the rest becomes GBNF text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from service.engine.gbnf import NEVER, Alt, Chars, Expr, Ref, Repeat, Seq, Text, references, rewrite, rule_text, seq

_PASSES = 8
"""Rounds of looking for equal rules; what is left after them is larger than it need be, no more."""
_MAX_GROUP = 500
"""Rules in a group that is repeated. llama.cpp takes 2,000."""


@dataclass(slots=True)
class Rules:
    """Named rules, of which some may be there from the beginning; those that are not used are not written."""

    bodies: dict[str, Expr]
    _numbers: dict[str, int] = field(default_factory=dict)

    def new(self, hint: str) -> Ref:
        """A new name that looks like `hint`; its body is to be set."""
        base = re.sub(r"[^a-zA-Z0-9]+", "-", hint).strip("-")[:40] or "rule"
        name = base
        while name in self.bodies:
            self._numbers[base] = number = self._numbers.get(base, 1) + 1
            name = f"{base}-{number}"
        self.bodies[name] = NEVER
        return Ref(name)

    def add(self, hint: str, body: Expr) -> Ref:
        ref = self.new(hint)
        self.bodies[ref.name] = body
        return ref

    def write(self) -> str:
        """GBNF with the start rule `root`; empty where no text fits."""
        self._prune()
        if self.bodies["root"] == NEVER:
            return ""
        self._merge()
        self._name_repeated()
        self._merge()
        return "".join(f"{name} ::= {rule_text(self.bodies[name])}\n" for name in self._reachable())

    def _prune(self) -> None:
        """Take out what never comes to an end."""
        finite: set[str] = set()
        size = -1
        while size < len(finite):
            size = len(finite)
            for name in reversed(self.bodies):  # rules mostly refer to later ones
                if name not in finite and _ends(self.bodies[name], finite):
                    finite.add(name)
        self._replace(lambda ref: ref if ref.name in finite else NEVER)

    def _merge(self) -> None:
        """One rule for each body, and none for a body that is as short as a name."""
        for _ in range(_PASSES):
            names: dict[Expr, str] = {}
            same: dict[str, Expr] = {}
            for name in self.bodies:  # those that were there first keep their names
                body = self.bodies[name]
                if isinstance(body, Text | Chars | Ref):
                    same[name] = body
                elif (first := names.setdefault(body, name)) != name:
                    same[name] = Ref(first)
            same.pop("root", None)
            if not same:
                return
            self._replace(lambda ref, same=same: same.get(ref.name, ref))  # type: ignore[misc]

    def _name_repeated(self) -> None:
        """A rule for each thing that is repeated a number of times.

        llama.cpp limits the repetitions times the rules and groups inside, and a name counts as one.
        """
        names: dict[Expr, Ref] = {}

        def named(expr: Expr, hint: str) -> Expr:
            match expr:
                case Seq(items):
                    return seq(*(named(item, hint) for item in items))
                case Alt(branches):
                    return Alt(tuple(named(branch, hint) for branch in branches))
                case Repeat(item, least, most):
                    item = named(item, hint)
                    if isinstance(item, Seq | Alt | Repeat) and not (
                        _once(least, most) and _rules_in(item) <= _MAX_GROUP
                    ):
                        item = names[item] = names.get(item) or self.add(f"{hint}-part", item)
                    return Repeat(item, least, most)
            return expr

        for name, body in list(self.bodies.items()):
            self.bodies[name] = named(body, name)

    def _replace(self, change: Callable[[Ref], Expr]) -> None:
        for name, body in self.bodies.items():
            self.bodies[name] = rewrite(body, change)

    def _reachable(self) -> list[str]:
        """`root` and all that it refers to, in the order of mention."""
        found = {"root": None}
        todo = ["root"]
        while todo:
            new = [name for name in dict.fromkeys(references(self.bodies[todo.pop()])) if name not in found]
            found.update(dict.fromkeys(new))
            todo += reversed(new)
        return list(found)


def _ends(expr: Expr, finite: set[str]) -> bool:
    match expr:
        case Ref(name):
            return name in finite
        case Seq(items):
            return all(_ends(item, finite) for item in items)
        case Alt(branches):
            return any(_ends(branch, finite) for branch in branches)
        case Repeat(item, least):
            return least == 0 or _ends(item, finite)
    return True


def _once(least: int, most: int | None) -> bool:
    return least <= 1 and most in (1, None)


def _rules_in(expr: Expr) -> int:
    """At least the rules that llama.cpp makes of it, with those that it first mentions."""
    match expr:
        case Seq(items) | Alt(items):
            return 1 + sum(map(_rules_in, items))
        case Repeat(item, least, most):
            return _rules_in(item) + (1 if most is None else most - least)
    return 1
