"""What a slot holds, taken out and put into another process's slot: it goes on as if it had never been away."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.engine.sequence import Sequence
from service.engine.types import FinishReason, Paused, Penalties, Request, Sampling, Started
from service.errors import Conflict, Exhausted
from tests.conftest import TINY
from tests.engine.test_speculation_models import KINDS, PROMPTS, Bench, loaded, models  # noqa: F401

GREEDY = Sampling(temperature=0, ignore_eos=True)


def finish(bench: Bench, name: str) -> list[int]:
    bench.run()
    return bench.answers[name].tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_elsewhere_is_the_one_here(models: dict[str, tuple[Path, Path]], kind: str) -> None:  # noqa: F811
    """Also past the sliding window, and with the draft model's state: it drafts and accepts the same."""
    prompt = PROMPTS[3] + [400 + i % 70 for i in range(30)]
    with loaded(models[kind], "model", slots=2) as here:
        here.submit(Request("a", tuple(prompt), GREEDY, max_tokens=20))
        history = [*prompt, *finish(here, "a")]
        contents = here.core.contents(0)
        turn = Request("b", (*history, 350, 351), GREEDY, max_tokens=32)
        here.submit(turn)
        expected, stayed = finish(here, "b"), here.answers["b"].finished
    assert contents.tokens == tuple(history[:-1])
    assert contents.draft is not None
    with loaded(models[kind], "model", slots=2) as there:
        assert there.core.put(1, contents)
        there.core.submit(Sequence(turn, there.runner.make_sampler(turn)))
        started = there.core.step() and next(e for _, e in there.core.take_outcomes() if isinstance(e, Started))
        assert isinstance(started, Started)
        assert (started.slot_id, started.reused_tokens) == (1, len(history) - 1)
        there.answers["b"] = type(here.answers["b"])()
        assert finish(there, "b") == expected[-len(there.answers["b"].tokens) :]
        assert stayed is not None
        moved = there.answers["b"].finished
        assert moved is not None
        assert moved.usage.generated == 32
        ours, theirs = moved.speculation, stayed.speculation
        assert (ours.drafted, ours.accepted, ours.accepted_at) == (theirs.drafted, theirs.accepted, theirs.accepted_at)


RESUMED = {
    "greedy": GREEDY,
    "seed": Sampling(temperature=0.8, seed=11, ignore_eos=True),
    "penalties": Sampling(temperature=0.9, seed=3, penalties=Penalties(repeat=1.4, presence=0.3), ignore_eos=True),
    "grammar": Sampling(temperature=0.9, seed=3, grammar='root ::= ("ab" | "ba" | "c" | " ")+'),
}


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_generation_goes_on_elsewhere_to_the_same_text(
    models: dict[str, tuple[Path, Path]],  # noqa: F811
    kind: str,
    name: str,
) -> None:
    request = Request("a", tuple(PROMPTS[0]), RESUMED[name], max_tokens=40, stop=("never",))
    with loaded(models[kind], "both", slots=2) as here:
        here.submit(request)
        for _ in range(8):
            here.step()
        contents = here.core.contents(0)
        sent = list(here.answers["a"].tokens)
        expected = finish(here, "a")
    paused = contents.paused
    assert isinstance(paused, Paused)
    assert len(sent) < len(expected)
    assert list(paused.generated) == expected[: len(paused.generated)]
    with loaded(models[kind], "both", slots=2) as there:
        there.core.put(0, contents)
        taken = there.core.paused(0)
        sampler = there.runner.make_sampler(taken.request)
        sampler.resume(taken.generated, taken.draws)
        there.answers["a"] = type(here.answers["a"])()
        there.core.submit(Sequence(taken.request, sampler, taken.generated, there.runner.pieces))
        rest = finish(there, "a")
        done = there.answers["a"].finished
        assert done is not None
        assert (done.reason, done.usage.generated) == (FinishReason.LENGTH, 40)
    assert [*paused.generated, *rest] == expected


def test_a_resumed_generation_whose_state_is_gone_is_computed_again(
    models: dict[str, tuple[Path, Path]],  # noqa: F811
) -> None:
    request = Request("a", tuple(PROMPTS[0]), RESUMED["seed"], max_tokens=30)
    with loaded(models["hybrid"], "none", slots=2) as bench:
        bench.submit(request)
        for _ in range(9):
            bench.step()
        paused = bench.core.contents(0).paused
        expected = finish(bench, "a")
        assert paused is not None
        bench.core.erase(0)
        sampler = bench.runner.make_sampler(request)
        sampler.resume(paused.generated, paused.draws)
        bench.answers["a"] = type(bench.answers["a"])()
        bench.core.submit(Sequence(request, sampler, paused.generated, bench.runner.pieces))
        assert [*paused.generated, *finish(bench, "a")] == expected


def test_ten_times_there_and_back(models: dict[str, tuple[Path, Path]]) -> None:  # noqa: F811
    with loaded(models["hybrid"], "none", slots=2) as bench:
        bench.submit(Request("a", tuple(PROMPTS[0]), GREEDY, max_tokens=10))
        history = [*PROMPTS[0], *finish(bench, "a")]
        first = bench.core.contents(0)
        for turn in range(10):
            contents = bench.core.contents(turn % 2)
            bench.core.erase(turn % 2)
            bench.core.put(1 - turn % 2, contents)
        again = bench.core.contents(0)
        assert (again.tokens, bytes(again.target)[8:]) == (first.tokens, bytes(first.target)[8:])
        bench.submit(Request("b", (*history, 301), GREEDY, max_tokens=5))
        assert bench.core._slots[0].busy or bench.step()
        finish(bench, "b")
        assert bench.answers["b"].finished is not None
        assert bench.answers["b"].finished.usage.reused == len(history) - 1


def test_a_shorter_state_replaces_a_longer_one(models: dict[str, tuple[Path, Path]]) -> None:  # noqa: F811
    with loaded(models["llama"], "none", slots=2) as bench:
        bench.submit(Request("long", tuple(PROMPTS[3]), GREEDY, max_tokens=30, slot_id=0))
        bench.submit(Request("short", tuple(PROMPTS[0]), GREEDY, max_tokens=5, slot_id=1))
        bench.run()
        short = bench.core.contents(1)
        bench.core.put(0, short)
        assert bench.core.contents(0).tokens == short.tokens
        bench.core.put(1, bench.core.contents(0))
        assert bytes(bench.core.contents(1).target) == bytes(short.target)


def test_what_cannot_be_put_back_leaves_an_empty_slot(models: dict[str, tuple[Path, Path]]) -> None:  # noqa: F811
    with loaded(models["llama"], "none", slots=2) as bench, loaded((TINY, TINY), "none", slots=2) as other:
        for one in (bench, other):
            one.submit(Request("a", tuple(PROMPTS[0]), GREEDY, max_tokens=5))
            one.run()
        with pytest.raises(Conflict, match="does not fit"):
            bench.core.put(0, other.core.contents(0))
        assert bench.core.contents(0).tokens == ()
        bench.submit(Request("again", tuple(PROMPTS[0]), GREEDY, max_tokens=5))
        assert finish(bench, "again") == bench.answers["a"].tokens


def test_a_busy_slot_takes_no_state_and_a_full_cache_makes_room(
    models: dict[str, tuple[Path, Path]],  # noqa: F811
) -> None:
    with loaded(models["llama"], "none", slots=2, context=256) as bench:
        prompt = tuple(300 + i % 90 for i in range(150))
        bench.submit(Request("a", prompt, GREEDY, max_tokens=4, slot_id=0))
        bench.run()
        contents = bench.core.contents(0)
        bench.core.put(1, contents)  # two of them have no room
        assert [slot.cached_tokens for slot in bench.core.slots()] == [0, len(contents.tokens)]
        bench.submit(Request("b", prompt, GREEDY, max_tokens=60, slot_id=1))
        bench.step()
        with pytest.raises(Conflict, match="busy"):
            bench.core.put(1, contents)
        with pytest.raises(Exhausted, match="no room"):
            bench.core.put(0, contents)
        bench.run()


def test_only_the_prompt(models: dict[str, tuple[Path, Path]]) -> None:  # noqa: F811
    with loaded(models["hybrid"], "none", slots=1) as bench:
        bench.submit(Request("a", tuple(PROMPTS[0]), GREEDY, max_tokens=0))
        assert finish(bench, "a") == []
        done = bench.answers["a"].finished
        assert done is not None
        assert (done.reason, done.usage.generated) == (FinishReason.LENGTH, 0)
        assert bench.core.contents(0).tokens == tuple(PROMPTS[0])
