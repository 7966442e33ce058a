"""JSON numbers within bounds, digit by digit.

Every number has one reading, and the numbers have at most so many digits that consumers can hold them: integers those
of 64 bits, others those of a double.
"""

from __future__ import annotations

from collections.abc import Iterator

from service.engine.gbnf import EMPTY, NEVER, Expr, alt, chars, of, optional, repeat, seq

INTEGER_DIGITS = 18
"""Of integers without a bound on that side: all of them fit 64 bits."""
NUMBER_DIGITS = 15
"""Of numbers with a bound, with those behind the point: a double tells all of them apart."""
MAX_DIGITS = 40
"""Of a bound."""

Bound = tuple[int, bool]
"""A whole number, and whether it is itself allowed."""


def _digits(low: str = "0", high: str = "9") -> Expr:
    return chars(((ord(low), ord(high)),))


_NONZERO = _digits("1")


def any_integer() -> Expr:
    return alt(["0", seq(optional(seq("-")), _NONZERO, repeat(_digits(), 0, INTEGER_DIGITS - 1))])


def any_number() -> Expr:
    whole = alt(["0", seq(_NONZERO, repeat(_digits(), 0, 15))])
    exponent = seq(chars(of("Ee")), optional(chars(of("+-"))), repeat(_digits(), 1, 2))
    return seq(optional(seq("-")), whole, optional(_fraction(16)), optional(exponent))


def integers(low: int | None, high: int | None) -> Expr:
    """All integers from `low` to `high`; None: no bound."""
    if low is None and high is None:
        return any_integer()
    low = -_reach(high, -1) if low is None else low
    high = _reach(low, 1) if high is None else high
    branches = []
    if high >= max(low, 0):
        branches.append(_naturals(max(low, 0), high))
    if low < 0 and low <= high:
        branches.append(seq("-", _naturals(max(-high, 1), -low)))
    return alt(branches)


def _reach(bound: int | None, sign: int) -> int:
    """How far to go, without a bound on the other side, in the direction of `sign`."""
    beyond = max((bound or 0) * sign, 0)
    return int("9" * max(INTEGER_DIGITS, len(str(beyond)) + 1))


def numbers(low: Bound | None, high: Bound | None) -> Expr:
    """All numbers from `low` to `high`, without exponents.

    Raises ValueError where a bound leaves no digit for what is behind the point.
    """
    if low is None and high is None:
        return any_number()
    longest = max(len(str(abs(bound[0]))) for bound in (low, high) if bound)
    if longest >= NUMBER_DIGITS:
        raise ValueError(f"a bound of a number can have at most {NUMBER_DIGITS - 1} digits")
    places = NUMBER_DIGITS - longest
    branches = []
    if high is None or high[0] >= 0:
        start = low if low and low[0] >= 0 else (0, True)
        branches.append(_positive(start, high, places))
    if low is None or low[0] < 0:
        end = None if low is None else (-low[0], low[1])
        start = (-high[0], high[1]) if high and high[0] <= 0 else (0, True)
        branches.append(seq("-", _positive(start, end, places)))
    return alt(branches)


def _positive(low: Bound, high: Bound | None, places: int) -> Expr:
    """Numbers of at least 0, without sign, with up to `places` digits behind the point."""
    fraction = _fraction(places)
    first, last = low[0] + (not low[1]), 10**NUMBER_DIGITS - 1 if high is None else high[0] - 1
    branches = []
    if high is not None and high[0] < low[0]:
        return NEVER
    if high is not None and high[0] == low[0]:
        return seq(str(low[0]), _zeros(places)) if low[1] and high[1] else NEVER
    if not low[1]:
        more = (places - 1) // 2
        nonzero = seq(repeat(seq("0"), 0, more), _NONZERO, repeat(_digits(), 0, places - 1 - more))
        branches.append(seq(f"{low[0]}.", nonzero))
    if first <= last:
        branches.append(seq(_naturals(first, last), optional(fraction)))
    if high is not None and high[1]:
        branches.append(seq(str(high[0]), _zeros(places)))
    return alt(branches)


def _fraction(places: int) -> Expr:
    return seq(".", repeat(_digits(), 1, places))


def _zeros(places: int) -> Expr:
    return optional(seq(".", repeat(seq("0"), 1, places)))


def _naturals(low: int, high: int) -> Expr:
    return alt(_by_length(low, high))


def _by_length(low: int, high: int) -> Iterator[Expr]:
    """Those of `low` to `high` by their number of digits, where all of a length are there together with the next."""
    if low == 0 and high > 9:
        yield seq("0")
        low = 1
    shortest = 0  # of lengths of which all numbers are there
    for length in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        full = first == 10 ** (length - 1) and last == 10**length - 1
        if full:
            shortest = shortest or length
            continue
        if shortest:
            yield _of_lengths(shortest, length - 1)
            shortest = 0
        yield _same_length(str(first), str(last))
    if shortest:
        yield _of_lengths(shortest, len(str(high)))


def _of_lengths(shortest: int, longest: int) -> Expr:
    return seq(_NONZERO, repeat(_digits(), shortest - 1, longest - 1))


def _same_length(low: str, high: str) -> Expr:
    if not low:
        return EMPTY
    rest = len(low) - 1
    zeros, nines = "0" * rest, "9" * rest
    if low[0] == high[0]:
        return seq(low[0], _same_length(low[1:], high[1:]))
    branches = []
    first, last = low[0], high[0]
    if low[1:] != zeros:
        branches.append(seq(first, _same_length(low[1:], nines)))
        first = chr(ord(first) + 1)
    if high[1:] != nines:
        last = chr(ord(last) - 1)
    if first <= last:
        branches.append(seq(_digits(first, last), repeat(_digits(), rest, rest)))
    if high[1:] != nines:
        branches.append(seq(high[0], _same_length(zeros, high[1:])))
    return alt(branches)
