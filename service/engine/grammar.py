"""A check of GBNF text before llama.cpp sees it.

llama.cpp reports no position, prints its complaints to stderr, recurses for every open parenthesis, and can loop,
abort or run out of memory on text that it accepts. This module reads the same language as `llama_grammar_parser`
(llama.cpp, src/llama-grammar.cpp), builds the same table of rules, and refuses what the library refuses and what it
does not survive. `grammar_text` reads the characters; what follows from all rules together is in `grammar_graph`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from service.engine.grammar_graph import ALTERNATIVE, Items, find_problem, size_of, terminal
from service.engine.grammar_text import GrammarError, GrammarLimit, Scanner
from service.engine.schema import check_schema

__all__ = ["GrammarError", "GrammarLimit", "check_gbnf", "check_schema"]

MAX_NESTING = 512
"""Open parentheses; llama.cpp spends about half a KiB of C stack on each."""
MAX_ELEMENTS = 256 * 1024
"""Elements (a character, a range, a reference) after repetitions are written out; 8 bytes each, held twice."""
MAX_RULES = 32 * 1024
"""Named rules, groups, and what repetitions are made of. It bounds the time of this check, to about a second."""
MAX_REPETITIONS = 2000
"""llama.cpp's MAX_REPETITION_THRESHOLD."""


def check_gbnf(text: str, *, is_token: Callable[[str], bool] | None = None) -> None:
    """Return if llama.cpp takes `text` as a grammar with the start rule `root`, and survives it.

    `is_token` says whether a text such as `<|im_end|>` is exactly one token of the model (tokenized with control
    tokens recognised and nothing added). Without it every `<text>` passes here, and the library may refuse it.

    Raises GrammarError with the place of the first thing that is wrong. It is a GrammarLimit where we are stricter
    than the library: for the limits here, in `grammar_text` and in `grammar_graph`; `{m,n}` with n < m (the library
    fills the memory) or n > 2,000 (it drops the bound); text that no token spells, after which the library throws
    through its C interface; and rules that make its stacks grow for ever.

    Not covered, because it depends on the text and the vocabulary: ambiguity. The library keeps all ways to read the
    text so far (2^n after n times "a" with `root ::= "a" root "b" | "a" root "c" | "d"`), and tries all ways to read
    each token, so that a token of n spaces and a grammar such as `root ::= (" " | " "){0,50} "x"` can occupy it for
    ever. Only what may be left out many times in a row is bounded (`grammar_graph.MAX_EMPTY_RUN`).
    """
    parser = _Parser(Scanner(text), is_token)
    parser.read()
    if problem := find_problem(parser.table()):
        parser.refuse(problem.rule, problem.message, GrammarLimit if problem.limit else GrammarError)


@dataclass(slots=True)
class _Open:
    """A rule or a group that is being read.

    `last` is where the newest symbol begins in `items`, and `weight` what it counts when it is repeated: llama.cpp's
    last_sym_start and n_prev_rules.
    """

    rule: int
    items: Items = field(default_factory=list)
    last: int = 0
    weight: int = 1


class _Parser:
    """Reads rules and numbers them like llama.cpp's symbol ids: by first mention, groups and repetitions as well.

    The open rule and groups are a list (`opened`) instead of recursion, so that Python's own stack is no limit.
    """

    def __init__(self, scanner: Scanner, is_token: Callable[[str], bool] | None) -> None:
        self.scanner = scanner
        self.is_token = is_token
        self.rules: dict[int, Items] = {}
        self.ids: dict[str, int] = {}
        self.places: list[int] = []
        """For each symbol, where it is defined; until then, where it was first mentioned."""
        self.elements = 0
        self.opened: list[_Open] = []
        self.readers: dict[str, Callable[[], None]] = {
            '"': lambda: self.terminal(self.scanner.literal()),
            "[": lambda: self.terminal(self.scanner.characters()),
            ".": self.any_character,
            "<": self.token,
            "!": self.token,
            "|": self.alternative,
            "(": self.open_group,
            ")": self.close_group,
            "*": lambda: self.repetition("*", 0, None),
            "+": lambda: self.repetition("+", 1, None),
            "?": lambda: self.repetition("?", 0, 1),
            "{": self.counted_repetition,
        }

    def read(self) -> None:
        self.scanner.skip(lines=True)
        while self.scanner.peek():
            self.rule()

    def table(self) -> list[Items]:
        """The rules by symbol id. Raises GrammarError unless `root`, and all that a rule refers to, is defined."""
        size = max(self.rules, default=-1) + 1
        used = {item for items in self.rules.values() for item in items if item >= 0}
        for rule in range(len(self.places)):
            # llama.cpp also wants its table without gaps, whether a rule that remains refers to them or not
            if rule not in self.rules and (rule < size or rule in used):
                self.refuse(rule, "is not defined")
        if self.ids.get("root") not in self.rules:
            raise GrammarError("there is no rule 'root'")
        return [self.rules[rule] for rule in range(size)]

    def refuse(self, rule: int, message: str, kind: type[GrammarError] = GrammarError) -> NoReturn:
        """Raise `kind` about a rule, or about a group or repetition, which have no name."""
        name = next((f"rule {name!r}" for name, symbol in self.ids.items() if symbol == rule), "what is repeated here")
        self.scanner.fail(f"{name} {message}", self.places[rule], kind)

    def rule(self) -> None:
        scanner = self.scanner
        start = scanner.at
        symbol = self.named(scanner.name(), start)
        self.places[symbol] = start
        scanner.skip(lines=False)
        scanner.take("::=")
        scanner.skip(lines=True)
        self.opened = [_Open(symbol)]
        self.sequences()
        self.close()
        scanner.line_end()
        scanner.skip(lines=True)

    def sequences(self) -> None:
        """Read up to what can be no part of a rule."""
        while True:
            character = self.scanner.peek()
            if character == ")" and not self.nested:
                return
            if reader := self.readers.get(character):
                reader()
            elif self.scanner.at_name():
                self.reference()
            elif self.nested:
                self.scanner.fail("expected ')'")
            else:
                return

    @property
    def nested(self) -> bool:
        return len(self.opened) > 1

    # Items. Each leaves the scanner at the next one.

    def terminal(self, elements: int) -> None:
        if elements:
            self.symbol(terminal(elements))
        else:
            self.opened[-1].last = len(self.opened[-1].items)
            self.scanner.skip(lines=self.nested)

    def any_character(self) -> None:
        self.scanner.take(".")
        self.symbol(terminal(1))

    def token(self) -> None:
        start = self.scanner.at
        if self.scanner.peek() == "!":
            self.scanner.at += 1
        text = self.scanner.token()
        if text is not None and self.is_token is not None and not self.is_token(text):
            self.scanner.fail(f"{text!r} is not a token of the model", start)
        self.symbol(terminal(1))

    def reference(self) -> None:
        start = self.scanner.at
        self.symbol(self.named(self.scanner.name(), start))

    def symbol(self, item: int, weight: int = 1) -> None:
        """Append what can be repeated as a whole."""
        top = self.opened[-1]
        self.spend(size_of([item]))
        top.last, top.weight = len(top.items), weight
        top.items.append(item)
        self.scanner.skip(lines=self.nested)

    def alternative(self) -> None:
        top = self.opened[-1]
        self.spend(1)
        top.items.append(ALTERNATIVE)
        top.last, top.weight = len(top.items), 1
        self.scanner.take("|")
        self.scanner.skip(lines=True)

    def open_group(self) -> None:
        if len(self.opened) > MAX_NESTING:
            self.scanner.fail(f"groups are nested deeper than {MAX_NESTING}", kind=GrammarLimit)
        self.opened.append(_Open(self.unnamed(self.scanner.at)))
        self.scanner.take("(")
        self.scanner.skip(lines=True)

    def close_group(self) -> None:
        group = self.close()
        self.scanner.take(")")
        # llama.cpp counts the symbols that appeared since the group was opened, itself included
        self.symbol(group, weight=len(self.places) - group)

    def close(self) -> int:
        done = self.opened.pop()
        self.spend(1)
        self.rules[done.rule] = done.items
        return done.rule

    # Repetitions

    def counted_repetition(self) -> None:
        scanner = self.scanner
        start = scanner.at
        scanner.take("{")
        scanner.skip(lines=self.nested)
        least = scanner.number()
        scanner.skip(lines=self.nested)
        most: int | None = least
        if scanner.peek() == ",":
            scanner.at += 1
            scanner.skip(lines=self.nested)
            most = scanner.number() if scanner.peek().isdecimal() else None
            scanner.skip(lines=self.nested)
        if least > MAX_REPETITIONS:
            scanner.fail(f"{least} repetitions; at most {MAX_REPETITIONS}", start)
        if most is not None and not least <= most <= MAX_REPETITIONS:
            scanner.fail(f"the maximum {most} is not in [{least}, {MAX_REPETITIONS}]", start, GrammarLimit)
        self.repetition("}", least, most, start)

    def repetition(self, mark: str, least: int, most: int | None, start: int | None = None) -> None:
        """Repeat the newest symbol, as handle_repetitions does: what is optional becomes a chain of new rules."""
        start = self.scanner.at if start is None else start
        self.scanner.take(mark)
        self.scanner.skip(lines=self.nested)
        top = self.opened[-1]
        item = top.items[top.last :]
        if not item:
            self.scanner.fail("there is nothing in front that could be repeated", start)
        top.weight *= most or least or 1
        if top.weight > MAX_REPETITIONS:
            self.scanner.fail(f"repetitions times rules to repeat are {top.weight}; at most {MAX_REPETITIONS}", start)
        optional = 1 if most is None else most - least
        self.spend(size_of(item) * (max(least, 1) - 1 + optional) + 3 * optional, start)
        top.items[top.last :] = item * least
        rest: Items = []
        for _ in range(optional):
            rule = self.unnamed(start)
            self.rules[rule] = [*item, *([rule] if most is None else rest), ALTERNATIVE]
            rest = [rule]
        top.items += rest

    # Symbols

    def named(self, name: str, place: int) -> int:
        if name not in self.ids:
            self.ids[name] = self.unnamed(place)
        return self.ids[name]

    def unnamed(self, place: int) -> int:
        if len(self.places) == MAX_RULES:
            self.scanner.fail(f"there are more than {MAX_RULES} rules, groups and repetitions", place, GrammarLimit)
        self.places.append(place)
        return len(self.places) - 1

    def spend(self, elements: int, place: int | None = None) -> None:
        self.elements += elements
        if self.elements > MAX_ELEMENTS:
            self.scanner.fail(f"the rules have more than {MAX_ELEMENTS} elements written out", place, GrammarLimit)
