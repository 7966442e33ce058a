"""Drafts from a slot's own text, against a naive search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.ngram import NgramIndex, Shadow

TEXTS = st.lists(st.integers(0, 2), max_size=60)


def index_of(tokens: list[int], **sizes: int) -> NgramIndex:
    index = NgramIndex(**sizes)
    index.extend(tokens)
    return index


def naive(text: list[int], n: int, low: int, high: int) -> tuple[list[int], int]:
    """The proposal by trying every length and every place, and the length of its match."""
    for length in range(min(high, len(text)), low - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                grown = list(text)
                while len(grown) < len(text) + n:
                    grown.append(grown[end + len(grown) - len(text)])
                return grown[len(text) :], length
    return [], 0


@given(TEXTS, st.lists(st.integers(0, 2), max_size=5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 6))
def test_a_proposal_follows_the_latest_of_the_longest_matches(
    tokens: list[int], extra: list[int], n: int, low: int, more: int
) -> None:
    index = index_of(tokens, min_match=low, max_match=low + more)
    assert (index.propose(n, extra), index.match_length) == naive(tokens + extra, n, low, low + more)
    assert len(index) == len(tokens)


@given(st.lists(st.one_of(st.lists(st.integers(0, 2), max_size=9), st.floats(0, 1)), max_size=12), TEXTS)
def test_after_any_extending_and_truncating_it_is_as_if_new(edits: list[list[int] | float], more: list[int]) -> None:
    tokens: list[int] = []
    index = NgramIndex()
    for edit in edits:
        if isinstance(edit, list):
            tokens += edit
            index.extend(edit)
        else:
            del tokens[int(edit * len(tokens)) :]
            index.truncate(len(tokens))
    fresh = index_of(tokens)
    for length in range(len(more) + 1):
        assert index.propose(5, more[:length]) == fresh.propose(5, more[:length])
        assert index.match_length == fresh.match_length
    index.extend(more)
    assert index.propose(5) == index_of(tokens + more).propose(5)


def test_token_by_token_is_the_same_as_at_once() -> None:
    text = [5, 6, 7, 8, 5, 6, 7, 9, 1, 5, 6, 7]
    index = NgramIndex()
    for token in text:
        index.extend([token])
    assert index.propose(3) == index_of(text).propose(3) == [9, 1, 5]


def test_periodic_text_goes_on_with_its_period() -> None:
    assert index_of([9, 1, 2, 3, 4, 1, 2, 3]).propose(10) == [4, 1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert index_of([7, 7, 7, 7]).propose(5) == [7] * 5


def test_a_longer_match_wins_over_a_later_one() -> None:
    index = index_of([1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 1, 2, 3, 4])
    assert index.propose(1) == [50]
    assert index.match_length == 4


def test_a_match_shorter_than_the_minimum_proposes_nothing() -> None:
    index = index_of([1, 2, 9, 1, 2])
    assert index.propose(4) == []
    assert index.match_length == 0
    assert NgramIndex().propose(4) == []
    assert index_of([1, 1, 1, 1]).propose(0) == []


def test_only_the_latest_candidates_are_looked_at() -> None:
    text = [9, 1, 2, 3, 70, 8, 1, 2, 3, 80, 8, 1, 2, 3, 81, 9, 1, 2, 3]
    assert index_of(text).propose(1) == [70]
    assert index_of(text, max_candidates=2).propose(1) == [81]


def test_large_token_ids_that_share_a_key_are_told_apart() -> None:
    far = 1 << 20
    assert index_of([1, 2, 3, 4, 1 + far, 2 + far, 3 + far]).propose(1) == []


def test_more_than_there_is_cannot_be_kept() -> None:
    index = index_of([1, 2])
    for length in (-1, 3):
        with pytest.raises(ValueError, match="cannot keep"):
            index.truncate(length)
    assert len(index) == 2


@pytest.mark.parametrize(("low", "high", "candidates"), [(0, 3, 1), (4, 3, 1), (1, 1, 0)])
def test_sizes_that_make_no_sense_are_refused(low: int, high: int, candidates: int) -> None:
    with pytest.raises(ValueError, match="min_match"):
        NgramIndex(low, high, candidates)


def test_a_shadow_tells_what_would_have_been_accepted() -> None:
    shadow = Shadow()
    assert shadow.idle
    shadow.watch([1, 2, 3], match_length=7)
    assert not shadow.idle
    assert shadow.match_length == 7
    assert shadow.advance([1]) is None
    assert shadow.advance([2, 9]) == (3, 2)
    assert shadow.idle
    assert shadow.advance([3]) is None


def test_a_shadow_is_decided_by_full_agreement_too() -> None:
    shadow = Shadow()
    shadow.watch([1, 2], match_length=3)
    assert shadow.advance([1, 2, 3, 4]) == (2, 2)


def test_a_shadow_of_nothing_stays_idle() -> None:
    shadow = Shadow()
    shadow.watch([], match_length=0)
    assert shadow.idle
    assert shadow.advance([1]) is None
