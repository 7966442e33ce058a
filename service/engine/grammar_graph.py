"""What follows from the rules of a grammar as a whole: left recursion, and how much work it makes for llama.cpp.

At every step llama.cpp replaces the rule on top of a stack by what the rule may begin with, until all stacks begin
with characters (`llama_grammar_advance_stack`); before that it looks for left recursion by walking the same way
(`llama_grammar_detect_left_recursion`). The walk visits every path, so a few dozen rules can keep it busy for hours;
it recurses; and it holds a rule to be possibly empty only where one of its alternatives has nothing in it, so that it
misses recursion behind rules that are empty for other reasons, and the stacks then grow for ever.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_BRANCHES = 512
"""Places where a rule may begin, counted along every path. It bounds the stacks that the library makes of one with this
rule on top, their growth, and the depth of its recursion (about 200 bytes of C stack each)."""
MAX_EMPTY_RUN = 16
"""Possibly empty items behind one another. Each may take a character or leave it to the next, so that the ways to read
n equal characters double with each: with 16, 0.15 s for all 2,048 tokens of a small vocabulary that has runs of 32
spaces; with 18 three times as much."""
MAX_WORK = 50_000_000
"""Elements that the library looks at while it searches for left recursion, about a nanosecond each."""
_CALL_WORK = 16
"""What a call costs beside the elements it looks at."""

Items = list[int]
"""The right side of a rule: a symbol id, ALTERNATIVE between alternatives, or `terminal(n)`."""
ALTERNATIVE = -1


def terminal(elements: int) -> int:
    """Something that consumes text (a string, a class, a token), written in `elements` >= 1 elements of llama.cpp."""
    return -1 - elements


def size_of(items: Sequence[int]) -> int:
    """Elements of llama.cpp in `items`."""
    return sum(1 if item >= ALTERNATIVE else -1 - item for item in items)


@dataclass(frozen=True, slots=True)
class Problem:
    """`rule` is the id of a rule that has it. With `limit` the library itself would not complain."""

    rule: int
    message: str
    limit: bool


def find_problem(rules: Sequence[Items]) -> Problem | None:
    """The first reason not to give these rules to llama.cpp, or None. `rules` are by symbol id, all defined."""
    return _search_problem(rules) or _expansion_problem(rules) or _run_problem(rules)


def _search_problem(rules: Sequence[Items]) -> Problem | None:
    """What stops the library's own search for left recursion: finding it, or taking too long."""
    empty = {rule for rule, items in enumerate(rules) if not all(map(len, _alternatives(items)))}
    starts = [[item for item, _ in _starts(items, empty) if item >= 0] for items in rules]
    work = [_CALL_WORK + size_of(items) for items in rules]
    total = 0
    for group in _components(starts):
        for rule in group:
            if len(group) > 1 or rule in starts[rule]:
                return Problem(min(group), "begins with itself (left recursion)", limit=False)
            work[rule] += sum(work[start] for start in starts[rule])
            total += work[rule]
            if total > MAX_WORK:
                return Problem(rule, "begins in too many ways", limit=True)
    return None


def _expansion_problem(rules: Sequence[Items]) -> Problem | None:
    """What makes the library's stacks grow without end, or to too many, or leaves none."""
    empty = _possibly_empty(rules)
    starts = [list(_starts(items, empty)) for items in rules]
    branches = [0] * len(rules)
    reaches_text = [False] * len(rules)
    for component in _components([[item for item, _ in found if item >= 0] for found in starts]):
        group = set(component)
        count, reaches = 0, False
        for rule in component:
            count += 1
            for item, is_last in starts[rule]:
                if item in group and not is_last:
                    return Problem(rule, "begins with itself where what stands in front is empty", limit=True)
                # rules of one group replace each other on the stack, so each of them is expanded once
                count += 1 if item < 0 else 0 if item in group else branches[item]
                reaches = reaches or item < 0 or reaches_text[item]
        if count > MAX_BRANCHES:
            return Problem(min(group), f"begins in more than {MAX_BRANCHES} ways", limit=True)
        if not reaches and not group <= empty:
            return Problem(min(group), "never comes to any text", limit=True)
        for rule in component:
            branches[rule], reaches_text[rule] = count, reaches
    return None


def _run_problem(rules: Sequence[Items]) -> Problem | None:
    """Too many possibly empty items in a row, be it in one rule or in rules that begin with one another."""
    empty = _possibly_empty(rules)
    passed = [0] * len(rules)
    """How many can be passed before the last beginning of a rule."""
    width = [0] * len(rules)
    """How many a rule consists of, as far as it may be empty."""
    for component in _components([[item for item, _ in _starts(items, empty) if item >= 0] for items in rules]):
        # rules of one group replace each other, and count 0 where they do
        runs = [list(_runs(rules[rule], empty, passed, width)) for rule in component]
        total_passed = sum(max(first for first, _, _ in found) for found in runs)
        total_width = sum(max(size for _, _, size in found) for found in runs)
        for rule in component:
            passed[rule], width[rule] = total_passed, max(total_width, 1)
    for rule, items in enumerate(rules):
        if any(most > MAX_EMPTY_RUN for _, most, _ in _runs(items, empty, passed, width)):
            return Problem(rule, f"has more than {MAX_EMPTY_RUN} items in a row that may be empty", limit=True)
    return None


def _runs(items: Items, empty: set[int], passed: Sequence[int], width: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """For each alternative, what can be passed from its beginning, and at most from any place over its own items; and
    its width."""
    for alternative in _alternatives(items):
        run, most, size, behind = 0, 0, 0, False
        for item in reversed(alternative):
            own = passed[item] if item >= 0 else 0
            run = max(own, run + width[item] if item in empty and behind else 0)
            most = max(most, run if run > own else 0)  # else it is the other rule's
            size += width[item] if item in empty else 0
            behind = True
        yield run, most, size if all(item in empty for item in alternative) else 0


def _alternatives(items: Items) -> Iterator[Items]:
    start = 0
    for place, item in enumerate(items):
        if item == ALTERNATIVE:
            yield items[start:place]
            start = place + 1
    yield items[start:]


def _starts(items: Items, empty: set[int]) -> Iterator[tuple[int, bool]]:
    """Items that a rule may begin with, and whether each is the last of its alternative."""
    open_start = True
    for place, item in enumerate(items):
        if item == ALTERNATIVE:
            open_start = True
        elif open_start:
            yield item, place + 1 == len(items) or items[place + 1] == ALTERNATIVE
            open_start = item in empty


def _possibly_empty(rules: Sequence[Items]) -> set[int]:
    """Rules that can produce the empty text."""
    users: dict[int, list[int]] = defaultdict(list)
    owner: list[int] = []
    missing: list[int] = []
    todo: list[int] = []
    for rule, items in enumerate(rules):
        for alternative in _alternatives(items):
            if any(item < 0 for item in alternative):
                continue
            for item in alternative:
                users[item].append(len(owner))
            owner.append(rule)
            missing.append(len(alternative))
            if not alternative:
                todo.append(rule)
    empty: set[int] = set()
    while todo:
        rule = todo.pop()
        if rule in empty:
            continue
        empty.add(rule)
        for alternative_id in users[rule]:
            missing[alternative_id] -= 1
            if not missing[alternative_id]:
                todo.append(owner[alternative_id])
    return empty


def _components(edges: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Strongly connected components, each after all that it leads to (Tarjan's algorithm, without recursion)."""
    complete = len(edges) + 1
    order = [0] * len(edges)  # 0: not seen yet; `complete`: in a component that was returned
    low = [0] * len(edges)
    path: list[int] = []
    numbers = itertools.count(1)
    for root in range(len(edges)):
        todo = [] if order[root] else [(root, iter(edges[root]))]
        while todo:
            node, children = todo[-1]
            if not order[node]:
                order[node] = low[node] = next(numbers)
                path.append(node)
            for child in children:
                if not order[child]:
                    todo.append((child, iter(edges[child])))
                    break
                low[node] = min(low[node], order[child])
            else:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[node])
                if low[node] == order[node]:
                    start = _last_index(path, node)
                    component, path[start:] = path[start:], []
                    for member in component:
                        order[member] = complete
                    yield component


def _last_index(values: Sequence[int], wanted: int) -> int:
    """Where `wanted` stands, looked for from the end, because a component is usually a single rule."""
    return next(place for place in range(len(values) - 1, -1, -1) if values[place] == wanted)
