"""Prompts that go another way than the one before, on memories that cannot be cut back."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.engine.scheduler import TAIL
from service.engine.types import DraftOptions, Request, Sampling
from tests.engine.test_speculation_models import Bench, loaded, models  # noqa: F401

GREEDY = Sampling(temperature=0, ignore_eos=True)
PROMPT = [1, *(300 + (7 * i) % 90 for i in range(200))]
KINDS = ("hybrid", "mamba2")


def ask(bench: Bench, name: str, prompt: list[int], count: int = 12) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt's were reused."""
    bench.submit(Request(name, tuple(prompt), GREEDY, max_tokens=count, draft=DraftOptions(n_max=0)))
    answer = bench.run()[name]
    assert answer.finished is not None
    return answer.tokens, answer.finished.usage.reused


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_goes_back_to_the_newest_that_fits(models: dict[str, tuple[Path, Path]], kind: str) -> None:  # noqa: F811
    other = [*PROMPT[:-2], 350, 351, 352]
    with loaded(models[kind], "none", slots=1, context_checkpoints=0) as bench:
        expected, _ = ask(bench, "fresh", other)
        ask(bench, "first", PROMPT)
        assert ask(bench, "second", other) == (expected, 0)
    with loaded(models[kind], "none", slots=1) as bench:
        ask(bench, "first", PROMPT)
        assert ask(bench, "second", other) == (expected, len(PROMPT) - TAIL)
        assert ask(bench, "shorter", PROMPT[: len(PROMPT) - 2 * TAIL])[1] == 0


def test_past_a_sliding_window(models: dict[str, tuple[Path, Path]]) -> None:  # noqa: F811
    """What an answer pushed out of the window comes back with the checkpoint of its prompt."""
    fields = {"slots": 1, "deterministic": False, "context": 2048, "ubatch": 64, "batch": 64}
    other = [*PROMPT[:-2], 350, 351, 352]
    reused = []
    for count in (0, 4):
        with loaded(models["sliding_window"], "none", context_checkpoints=count, **fields) as bench:
            ask(bench, "first", PROMPT, 600)
            reused.append(ask(bench, "second", other)[1])
    assert reused == [0, len(PROMPT) - TAIL]


@pytest.mark.parametrize("kind", KINDS)
def test_they_go_along_with_a_state(models: dict[str, tuple[Path, Path]], kind: str) -> None:  # noqa: F811
    other = [*PROMPT[:-2], 350, 351, 352]
    with loaded(models[kind], "none", slots=2) as here:
        ask(here, "first", PROMPT)
        contents = here.core.contents(0)
        expected = ask(here, "second", other)
    assert [checkpoint.length for checkpoint in contents.checkpoints] == [len(PROMPT) - TAIL]
    with loaded(models[kind], "none", slots=2) as there:
        there.core.put(1, contents)
        assert ask(there, "second", other) == expected


def test_their_number_and_size_are_bounded(models: dict[str, tuple[Path, Path]]) -> None:  # noqa: F811
    with loaded(models["hybrid"], "none", slots=1, context_checkpoints=3) as bench:
        history = list(PROMPT)
        for turn in range(6):
            tokens, reused = ask(bench, f"t{turn}", history)
            assert reused == (len(history) - 28 - 1 if turn else 0)
            history += [*tokens, *(310 + i for i in range(28))]
            assert len(bench.core.contents(0).checkpoints) <= 3
    with loaded(models["hybrid"], "none", slots=1, checkpoint_bytes=10) as bench:
        ask(bench, "a", PROMPT)
        assert bench.core.contents(0).checkpoints == ()
