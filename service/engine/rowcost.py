"""What a decode costs by its number of rows, learned while running. Times are seconds; there is no clock here."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise

_ROW_SLOPE = 0.25  # of a further row, relative to the first, before anything was measured
_KNOWN = 8  # measurements after which a deviation is the machine's doing rather than an error of the curve
_MOST_KNOWN = 50  # measurements that count, so that the curve can still change
_DRIFT = 0.1  # weight of the newest measurement in the machine's speed
_OUTLIER = math.log(1.5)  # at most is believed of a deviation where the cost is known
_HICCUP = math.log(1.2)  # at most is believed of one upwards where it is not, unless the one before was as large
_SURPRISE = math.log(2.0)  # more than that there was a wrong guess, which is no part of an average
_SMALL = 64  # rows; larger decodes are prompts and say little about the speed of small ones


@dataclass(slots=True)
class _Point:
    """One number of rows on the curve."""

    cost: float
    """Natural logarithm, relative to the speed of the machine."""
    measured: int = 0
    """Measurements that count."""
    deviation: float = 0.0
    """Of the last measurement."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """What the points make together: rows, seconds, and seconds a row up to the next point, beyond the last as well."""

    rows: list[int]
    seconds: list[float]
    slopes: list[float]
    least_slopes: list[float]
    """The least one from there on."""


class RowCost:
    """Expected seconds of a decode by its rows.

    It is a curve times the speed of the machine. The curve has a point for each number of rows up to 15 and eight for
    each doubling beyond; it is made non-decreasing by pooling adjacent violators (isotonic regression). The speed moves
    all points at once, so that a change of load, seen at one number of rows, does not make another look cheap.
    """

    def __init__(self, guess: float) -> None:
        """`guess` is the cost of one row before anything was measured."""
        self._guess = guess
        self._speed = 0.0  # natural logarithm of the factor for all points
        self._points: dict[int, _Point] = {}
        self._fitted: _Curve | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one decode. Hiccups are clipped; what a clock cannot tell (0 seconds) is ignored."""
        if rows <= 0 or seconds <= 0:
            return
        place = _place(rows)
        if not self._points:
            self._speed = math.log(seconds)
            self._points[place] = _Point(0.0)
        point = self._points.get(place)
        if point is None:
            point = self._points[place] = _Point(math.log(self.at(place)) - self._speed)
        if place != rows:  # several numbers of rows share a point
            seconds *= self.at(place) / self.at(rows)
        deviation = math.log(seconds) - self._speed - point.cost
        if point.measured >= _KNOWN:
            believed = min(max(deviation, -_OUTLIER), _OUTLIER)
            if rows <= _SMALL:
                self._speed += _DRIFT * believed
        else:
            believed = min(deviation, max(point.deviation, _HICCUP))
        point.measured = min(point.measured + 1, _MOST_KNOWN)
        point.cost += believed if abs(believed) > _SURPRISE else believed / point.measured
        point.deviation = deviation
        self._fitted = None

    def known(self, rows: int) -> bool:
        """Whether decodes of about `rows` rows were measured often."""
        point = self._points.get(_place(rows))
        return point is not None and point.measured >= _KNOWN

    def at(self, rows: int) -> float:
        """Expected seconds of a decode of `rows` rows; 0 for none. Never decreases with the rows."""
        if rows <= 0:
            return 0.0
        if not self._points:
            return self._guess * _prior(rows)
        curve = self._fitted or self._fit()
        index = bisect_right(curve.rows, rows) - 1
        if index >= 0:
            return curve.seconds[index] + curve.slopes[index] * (rows - curve.rows[index])
        return curve.seconds[0] * _prior(rows) / _prior(curve.rows[0])

    def least_slope(self, rows: int) -> float:
        """Seconds that a row costs at least, beyond `rows` of them."""
        if not self._points:
            return self._guess * _ROW_SLOPE
        curve = self._fitted or self._fit()
        index = bisect_right(curve.rows, rows) - 1
        if index >= 0:
            return curve.least_slopes[index]
        return min(curve.least_slopes[0], curve.seconds[0] * _ROW_SLOPE / _prior(curve.rows[0]))

    def _fit(self) -> _Curve:
        rows = sorted(self._points)
        pools: list[tuple[float, int, int]] = []  # seconds, measurements, points
        for place in rows:
            point = self._points[place]
            seconds, weight, count = math.exp(self._speed + point.cost), max(point.measured, 1), 1
            while pools and pools[-1][0] > seconds:
                other, other_weight, others = pools.pop()
                seconds = (seconds * weight + other * other_weight) / (weight + other_weight)
                weight, count = weight + other_weight, count + others
            pools.append((seconds, weight, count))
        fitted = [seconds for seconds, _, count in pools for _ in range(count)]
        steps = zip(pairwise(rows), pairwise(fitted), strict=True)
        slopes = [(above - below) / (more - fewer) for (fewer, more), (below, above) in steps]
        if len(rows) > 1:
            slopes.append((fitted[-1] - fitted[0]) / (rows[-1] - rows[0]))
        else:
            slopes.append(fitted[0] * _ROW_SLOPE / _prior(rows[0]))
        least = list(accumulate(reversed(slopes), min))[::-1]
        self._fitted = _Curve(rows, fitted, slopes, least)
        return self._fitted


def _prior(rows: int) -> float:
    """The cost relative to that of one row, as long as nothing tells otherwise."""
    return 1 + _ROW_SLOPE * (rows - 1)


def _place(rows: int) -> int:
    """The point of the curve that a number of rows belongs to."""
    step = 1 << max(0, rows.bit_length() - 4)
    return (rows + step // 2) // step * step
