"""What is learned of the cost of decodes."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.rowcost import RowCost

F32 = {1: 0.0310, 2: 0.0317, 4: 0.0371, 8: 0.0456, 16: 0.0681}
"""Seconds of a decode of SmolLM2-135M, measured on 2 cores."""


def learned(costs: dict[int, float], times: int = 10) -> RowCost:
    cost = RowCost(guess=1.0)
    for _ in range(times):
        for rows, seconds in costs.items():
            cost.observe(rows, seconds)
    return cost


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-6, 10)), max_size=40))
def test_more_rows_never_cost_less(observations: list[tuple[int, float]]) -> None:
    cost = RowCost(guess=0.01)
    for rows, seconds in observations:
        cost.observe(rows, seconds)
    costs = [cost.at(rows) for rows in range(700)]
    assert costs[0] == 0
    assert costs[1] > 0
    assert all(more >= fewer * (1 - 1e-9) for fewer, more in itertools.pairwise(costs))
    for rows in (1, 5, 100):
        least = cost.least_slope(rows)
        assert all(cost.at(rows + n) - cost.at(rows) >= n * least * (1 - 1e-6) - 1e-9 for n in (1, 2, 7, 500))


def test_what_was_measured_is_predicted_and_the_rest_interpolated() -> None:
    cost = learned(F32)
    for rows, seconds in F32.items():
        assert cost.at(rows) == pytest.approx(seconds, rel=0.01)
    assert cost.at(6) == pytest.approx((F32[4] + F32[8]) / 2, rel=0.01)
    assert cost.at(24) == pytest.approx(F32[16] + 8 * (F32[16] - F32[1]) / 15, rel=0.01)


def test_before_anything_was_measured_there_is_a_guess() -> None:
    assert RowCost(guess=0.02).at(1) == 0.02
    assert 0.02 < RowCost(guess=0.02).at(2) < 0.04
    assert RowCost(guess=0.0).at(5) == 0


def test_one_measurement_sets_the_scale() -> None:
    cost = RowCost(guess=1.0)
    cost.observe(4, 0.01)
    assert cost.at(4) == pytest.approx(0.01)
    assert 0.002 < cost.at(1) < 0.01 < cost.at(8) < 0.02


def test_a_hiccup_changes_little() -> None:
    cost = learned(F32)
    cost.observe(4, 10 * F32[4])
    assert cost.at(4) == pytest.approx(F32[4], rel=0.1)


def test_a_hiccup_at_the_first_measurement_is_forgotten_soon() -> None:
    for start in (RowCost(guess=1.0), learned({1: F32[1]})):
        for seconds in [10 * F32[8]] + [F32[8]] * 4:
            start.observe(8, seconds)
        assert start.at(8) == pytest.approx(F32[8], rel=0.15)


def test_a_wrong_guess_is_given_up_soon() -> None:
    cost = learned({1: 0.001, 8: 0.001})  # further rows seem to be free
    for _ in range(4):
        cost.observe(512, 0.5)
    assert cost.at(512) == pytest.approx(0.5, rel=0.1)


def test_a_change_of_load_moves_the_costs_of_all_rows() -> None:
    cost = learned(F32, times=20)
    for _ in range(60):
        cost.observe(1, 2 * F32[1])
    assert cost.at(1) == pytest.approx(2 * F32[1], rel=0.1)
    assert cost.at(8) > 1.6 * F32[8]
    for _ in range(60):
        cost.observe(1, F32[1])
    assert cost.at(8) == pytest.approx(F32[8], rel=0.1)


def test_prompts_do_not_spoil_what_is_known_of_few_rows() -> None:
    cost = learned(F32)
    for _ in range(50):
        cost.observe(512, 1.0)
        cost.observe(300, 5.0)
    assert cost.at(4) == pytest.approx(F32[4], rel=0.02)


def test_noise_averages_out() -> None:
    draw = random.Random(1)
    cost = RowCost(guess=1.0)
    for _ in range(200):
        for rows, seconds in F32.items():
            hiccup = 10 if draw.random() < 0.01 else 1
            cost.observe(rows, seconds * draw.uniform(0.8, 1.2) * hiccup)
    scale = cost.at(1) / F32[1]
    assert scale == pytest.approx(1, rel=0.15)
    for rows, seconds in F32.items():
        assert cost.at(rows) / seconds == pytest.approx(scale, rel=0.12)


def test_it_is_known_what_was_measured_often() -> None:
    cost = learned({4: 0.02}, times=7)
    assert not cost.known(4)
    cost.observe(4, 0.02)
    assert cost.known(4)
    assert not cost.known(5)


def test_what_a_clock_cannot_tell_is_ignored() -> None:
    cost = learned(F32)
    before = cost.at(1)
    cost.observe(1, 0.0)
    cost.observe(0, 1.0)
    assert cost.at(1) == before
