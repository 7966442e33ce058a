"""The host cache of conversations that lost their slot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from service.engine.sequence import Sequence
from service.engine.shelf import Shelf
from service.engine.types import Request, Sampling, SlotContents
from tests.engine.test_core import Greedy
from tests.engine.test_speculation_models import KINDS, loaded, models  # noqa: F401

GREEDY = Sampling(temperature=0, ignore_eos=True)


def contents(tokens: range, size: int = 100, key: str = "") -> SlotContents:
    return SlotContents(tuple(tokens), np.zeros(size, np.uint8).data, cache_key=key)


def asking(tokens: range, **options: object) -> Sequence:
    return Sequence(Request("a", tuple(tokens), GREEDY, **options), Greedy())  # type: ignore[arg-type]


def test_what_was_used_longest_ago_goes_first() -> None:
    shelf = Shelf(250, whole=False)
    for start in (0, 1000, 2000):
        shelf.keep(contents(range(start, start + 200)))
    assert (len(shelf), shelf.bytes) == (2, 200)
    assert shelf.take(asking(range(210)), 0) is None
    assert shelf.take(asking(range(1000, 1210)), 0) is not None
    assert (len(shelf), shelf.bytes) == (1, 100)


def test_a_longer_one_takes_the_place_of_what_it_goes_on_from() -> None:
    shelf = Shelf(1000, whole=False)
    shelf.keep(contents(range(200)))
    shelf.keep(contents(range(300)))
    assert len(shelf) == 1


def test_only_what_helps_is_taken() -> None:
    shelf = Shelf(1000, whole=False)
    shelf.keep(contents(range(300), key="a"))
    assert shelf.take(asking(range(400)), 0) is None  # another key
    assert shelf.take(asking(range(400), cache_key="a", reuse_prefix=False), 0) is None
    assert shelf.take(asking(range(400), cache_key="a"), 250) is None  # its slot has nearly as much
    assert shelf.take(asking(range(200), cache_key="a"), 0) is not None


def test_a_state_that_cannot_go_back_has_to_fit_whole() -> None:
    shelf = Shelf(1000, whole=True)
    shelf.keep(contents(range(300)))
    assert shelf.take(asking(range(200)), 0) is None
    assert shelf.take(asking(range(301)), 0) is not None


def test_one_that_is_too_large_is_not_kept() -> None:
    shelf = Shelf(50, whole=False)
    assert not shelf.wants(500, 51)
    assert not shelf.wants(5, 5)
    shelf.keep(contents(range(300)))
    assert (len(shelf), shelf.bytes) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_more_conversations_than_slots(models: dict[str, tuple[Path, Path]], kind: str) -> None:  # noqa: F811
    """Three conversations take turns on one slot: each finds all of its own again, and gives the same text."""
    openings = [[100 + who, *(300 + (7 * i * (1 + who)) % 90 for i in range(150))] for who in range(3)]
    texts: dict[int, list[list[int]]] = {}
    for memory in (0, 1 << 28):
        with loaded(models[kind], "none", slots=1, cache_memory=memory) as bench:
            histories = [list(opening) for opening in openings]
            for turn in range(3):
                for who, history in enumerate(histories):
                    name = f"{who}.{turn}"
                    bench.submit(Request(name, tuple(history), GREEDY, max_tokens=8))
                    answer = bench.run()[name]
                    assert answer.finished is not None
                    expected = len(history) - 2 if turn and memory else 0
                    assert answer.finished.usage.reused == expected
                    history += [*answer.tokens, 400 + who]
            texts[memory] = histories
            load = bench.core.load()
            assert (load.shelved_states > 0) == (memory > 0)
            assert (load.fetched_tokens > 900) == (memory > 0)
    assert texts[0] == texts[1 << 28]
