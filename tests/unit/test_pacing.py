"""How many prompt rows a step takes."""

from __future__ import annotations

from service.engine.pacing import Pacer


def settle(
    pacer: Pacer, generating: int, row_seconds: float, pace: float, steps: int = 100, growth: float = 0.0
) -> list[tuple[int, float]]:
    """(prompt rows, seconds) of steps on a machine where each prompt row adds `row_seconds` to the pace, and, for good,
    `growth` to the pace itself, as attention over a growing cache does.
    """
    done = []
    for _ in range(steps):
        rows = pacer.prompt_rows(generating, prompts=True)
        seconds = pace + rows * row_seconds
        pacer.observe(generating, rows, seconds)
        done.append((rows, seconds))
        pace += growth * rows
    return done


def measured(pacer: Pacer, generating: int, *seconds: float) -> None:
    for value in seconds:
        assert pacer.prompt_rows(generating, prompts=False) > 0
        pacer.observe(generating, 0, value)


def test_alone_a_prompt_takes_as_much_as_a_decode_can() -> None:
    assert Pacer(2.0, 512).prompt_rows(0, prompts=True) == 512


def test_beside_others_a_step_stays_within_the_factor() -> None:
    pacer = Pacer(2.2, 512)
    measured(pacer, 4, *[0.020] * 5)
    done = settle(pacer, 4, row_seconds=0.002, pace=0.020)
    assert max(seconds for _, seconds in done) <= 2.2 * 0.020 * 1.05
    assert max(seconds for _, seconds in done[-8:]) >= 2.0 * 0.020  # and the room is used


def test_a_pace_that_gets_slower_with_the_cache_neither_starves_the_prompt_nor_lets_it_run_away() -> None:
    pacer = Pacer(2.2, 512)
    measured(pacer, 7, *[0.026] * 5)
    done = settle(pacer, 7, row_seconds=0.0025, pace=0.026, growth=10e-6, steps=400)
    processed = 0
    for rows, seconds in done:
        processed += rows
        if processed > 2000:
            break
        assert seconds <= 3.0 * 0.026
    assert processed > 2000
    assert min(rows for rows, _ in done if rows) >= 3


def test_now_and_then_a_step_without_prompts_measures_the_pace() -> None:
    pacer = Pacer(2.2, 512)
    measured(pacer, 2, 0.010)
    done = settle(pacer, 2, row_seconds=0.001, pace=0.010, steps=170)
    assert sum(rows == 0 for rows, _ in done) == 10


def test_a_pace_that_is_measured_too_long_once_costs_little() -> None:
    pacer = Pacer(2.2, 512)
    measured(pacer, 7, 0.020, 0.021, 0.500, 0.020)  # a hiccup of the machine
    done = settle(pacer, 7, row_seconds=0.002, pace=0.020)
    assert max(seconds for _, seconds in done) <= 2.2 * 0.020 * 1.25


def test_a_hiccup_during_a_prompt_shrinks_the_chunk_for_a_short_time() -> None:
    pacer = Pacer(2.2, 512)
    measured(pacer, 4, *[0.020] * 5)
    settled = max(seconds for _, seconds in settle(pacer, 4, row_seconds=0.002, pace=0.020)[-8:])
    pacer.observe(4, max(pacer.prompt_rows(4, prompts=True), 1), 0.500)
    assert max(seconds for _, seconds in settle(pacer, 4, row_seconds=0.002, pace=0.020)[-8:]) >= 0.95 * settled


def test_a_slow_machine_still_makes_progress() -> None:
    pacer = Pacer(1.5, 512)
    measured(pacer, 1, 0.001)
    done = settle(pacer, 1, row_seconds=1.0, pace=0.001)
    assert {rows for rows, _ in done[-16:]} == {0, 1}


def test_without_measurements_the_first_chunk_is_small() -> None:
    assert 0 < Pacer(2.0, 512).prompt_rows(3, prompts=True) < 16


def test_the_rows_of_all_fit_one_decode() -> None:
    pacer = Pacer(100.0, 32)
    measured(pacer, 8, 1.0)
    done = settle(pacer, 8, row_seconds=1e-6, pace=1.0)
    assert max(rows for rows, _ in done) == 24
