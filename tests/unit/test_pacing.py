"""How many prompt rows a step takes."""

from __future__ import annotations

from service.engine.pacing import Pacer


def settle(pacer: Pacer, generating: int, row_seconds: float, pace: float, steps: int = 100) -> list[float]:
    """Steps of a machine where each prompt row adds `row_seconds` to the pace; returns their durations."""
    durations = []
    for _ in range(steps):
        rows = pacer.prompt_rows(generating)
        durations.append(pace + rows * row_seconds)
        pacer.observe(generating, rows, durations[-1])
    return durations


def test_alone_a_prompt_takes_as_much_as_is_computed_at_once() -> None:
    assert Pacer(2.0, 512).prompt_rows(0) == 512


def test_beside_others_a_step_stays_within_the_factor() -> None:
    pacer = Pacer(2.2, 512)
    for _ in range(5):
        pacer.observe(4, 0, 0.020)
    durations = settle(pacer, 4, row_seconds=0.002, pace=0.020)
    assert max(durations) <= 2.2 * 0.020 * 1.05
    assert durations[-1] >= 2.0 * 0.020  # and the room is used


def test_a_pace_that_is_measured_too_long_once_costs_little() -> None:
    pacer = Pacer(2.2, 512)
    for seconds in (0.020, 0.021, 0.500, 0.020):  # a hiccup of the machine
        pacer.observe(7, 0, seconds)
    assert max(settle(pacer, 7, row_seconds=0.002, pace=0.020)) <= 2.2 * 0.020 * 1.25


def test_a_hiccup_during_a_prompt_shrinks_the_chunk_for_a_short_time() -> None:
    pacer = Pacer(2.2, 512)
    for _ in range(5):
        pacer.observe(4, 0, 0.020)
    settled = settle(pacer, 4, row_seconds=0.002, pace=0.020)[-1]
    pacer.observe(4, pacer.prompt_rows(4), 0.500)
    assert settle(pacer, 4, row_seconds=0.002, pace=0.020)[-1] >= 0.95 * settled


def test_a_slow_machine_still_makes_progress() -> None:
    pacer = Pacer(1.5, 512)
    pacer.observe(1, 0, 0.001)
    settle(pacer, 1, row_seconds=1.0, pace=0.001)
    assert pacer.prompt_rows(1) == 1


def test_without_measurements_the_first_chunk_is_small() -> None:
    assert Pacer(2.0, 512).prompt_rows(3) < 16


def test_the_rows_of_all_fit_what_is_computed_at_once() -> None:
    pacer = Pacer(100.0, 32)
    pacer.observe(8, 0, 1.0)
    settle(pacer, 8, row_seconds=1e-6, pace=1.0)
    assert pacer.prompt_rows(8) == 24
