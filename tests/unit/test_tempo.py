"""How many tokens are drafted, given what drafting costs and brings. See test_tempo_simulated for whole runs."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.acceptance import Acceptance, Track
from service.engine.tempo import Candidate, Tempo


def tempo_of(base: float, rows: list[float], draft: float) -> Tempo:
    """A tempo that has measured the cost of decodes, and that of a draft step for any number of slots."""
    tempo = Tempo()
    for _ in range(10):
        for count, seconds in enumerate(itertools.accumulate(rows, initial=base), start=1):
            tempo.target.observe(count, seconds)
        tempo.draft.observe(1, draft)
        tempo.draft.observe(8, draft)
    return tempo


def flat(row: float = 0.001, draft: float = 0.001) -> Tempo:
    return tempo_of(0.010, [row] * 16, draft)


def speed(tempo: Tempo, candidates: list[Candidate], counts: tuple[int, ...]) -> float:
    """Expected tokens a second, worked out the long way."""
    tokens = sum(sum(c.probability**k for k in range(n + 1)) for c, n in zip(candidates, counts, strict=True))
    seconds = tempo.target.at(len(candidates) + sum(counts))
    seconds += sum(c.overhead for c, n in zip(candidates, counts, strict=True) if n)
    for depth in range(max(counts)):
        seconds += tempo.draft.at(sum(n > depth and c.model for c, n in zip(candidates, counts, strict=True)))
    return tokens / seconds


def random_problem(draw: random.Random) -> tuple[Tempo, list[Candidate]]:
    """Costs with steps or without, and up to three slots of any kind."""
    steps = draw.random() < 0.4
    rows = [draw.choice([0.0, draw.uniform(0, 0.01)]) if steps else draw.uniform(0, 0.004) for _ in range(16)]
    tempo = tempo_of(draw.uniform(0.005, 0.04), rows, draft=10 ** draw.uniform(-6, -2))
    candidates = [
        Candidate(
            Track(),
            limit=draw.randrange(5),
            probability=draw.uniform(0.05, 0.99),
            model=draw.random() < 0.5,
            overhead=draw.choice([0, 0, 0.002]),
        )
        for _ in range(draw.randint(1, 3))
    ]
    return tempo, candidates


def test_the_choice_is_close_to_the_best_of_all() -> None:
    draw = random.Random(0)
    parts = []
    for _ in range(1000):
        tempo, candidates = random_problem(draw)
        chosen = tuple(tempo.choose(candidates))
        every = itertools.product(*(range(candidate.limit + 1) for candidate in candidates))
        parts.append(speed(tempo, candidates, chosen) / max(speed(tempo, candidates, counts) for counts in every))
    assert sum(part > 0.97 for part in parts) >= 980
    assert min(parts) > 0.9


@given(st.randoms(use_true_random=False), st.integers(0, 6))
def test_no_choice_is_worse_than_none_or_beyond_its_limits(draw: random.Random, room: int) -> None:
    tempo, candidates = random_problem(draw)
    chosen = tuple(tempo.choose(candidates, room=room))
    assert sum(chosen) <= room
    assert all(0 <= n <= candidate.limit for n, candidate in zip(chosen, candidates, strict=True))
    if any(chosen):
        assert speed(tempo, candidates, chosen) > 1.029 * speed(tempo, candidates, (0,) * len(candidates))


def test_cheap_rows_and_likely_tokens_are_drafted_to_the_limit() -> None:
    assert flat(row=0.0001).choose([Candidate(Track(), 5, 0.99)]) == [5]


def test_expensive_rows_are_not_drafted() -> None:
    tempo = flat(row=0.010)
    assert tempo.choose([Candidate(Track(), 5, 0.9)]) == [0]
    assert tempo.choose([Candidate(Track(), 5, 0.9), Candidate(Track(), 5, 0.3)]) == [0, 0]


def test_the_likelier_tokens_get_the_rows() -> None:
    chosen = flat(row=0.004).choose([Candidate(Track(), 8, 0.3), Candidate(Track(), 8, 0.95)])
    assert chosen[0] == 0
    assert chosen[1] > 0


def test_an_overhead_can_make_drafting_useless() -> None:
    assert flat().choose([Candidate(Track(), 4, 0.8)])[0] > 0
    assert flat().choose([Candidate(Track(), 4, 0.8, overhead=0.050)]) == [0]


def test_a_step_of_the_draft_model_is_worth_it_if_enough_slots_share_it() -> None:
    tempo = flat(row=0.0001, draft=0.003)
    assert tempo.choose([Candidate(Track(), 1, 0.6, model=True)], others=3) == [0]
    assert tempo.choose([Candidate(Track(), 1, 0.6, model=True) for _ in range(4)]) == [1] * 4


def test_a_backlog_of_the_draft_model_counts_but_is_written_off() -> None:
    tempo = flat()
    for _ in range(10):
        tempo.draft.observe(512, 0.5)
    assert tempo.choose([Candidate(Track(), 4, 0.9, model=True, backlog=0)])[0] > 0
    assert tempo.choose([Candidate(Track(), 4, 0.9, model=True, backlog=20)])[0] > 0
    assert tempo.choose([Candidate(Track(), 4, 0.9, model=True, backlog=512)]) == [0]


def test_prompts_in_the_step_are_no_reason_to_draft() -> None:
    tempo = flat(row=0.009)
    assert tempo.choose([Candidate(Track(), 4, 0.8)]) == [0]
    assert tempo.choose([Candidate(Track(), 4, 0.8)], prompt_rows=100) == [0]
    assert flat().choose([Candidate(Track(), 4, 0.8)], prompt_rows=3)[0] > 0


def test_the_room_of_the_decode_is_kept() -> None:
    candidates = [Candidate(Track(), 8, 0.99) for _ in range(3)]
    assert sum(flat(row=0.0001).choose(candidates, room=5)) == 5
    assert flat(row=0.0001).choose(candidates, room=0) == [0, 0, 0]


def test_slots_that_do_not_draft_weigh_in() -> None:
    candidate = [Candidate(Track(), 1, 0.9)]
    tempo = tempo_of(0.010, [0.0005] * 7 + [0.02] * 9, draft=0.001)
    assert tempo.choose(candidate) == [1]
    assert tempo.choose(candidate, others=6) == [1]
    assert tempo.choose(candidate, others=7) == [0]


def test_nobody_drafts_where_nobody_generates() -> None:
    assert Tempo().choose([]) == []
    assert Tempo().choose([], others=3, prompt_rows=50) == []


def test_without_measurements_it_is_tried() -> None:
    assert Tempo().choose([Candidate(Track(), 4, Track().probability(), model=True)])[0] > 0


def test_without_drafts_is_measured_first_where_drafting_gains_little() -> None:
    tempo = Tempo()
    for rows, seconds in ((1, 0.010), (2, 0.013), (3, 0.030)):
        for _ in range(4):
            tempo.target.observe(rows, seconds)
    assert tempo.choose([Candidate(Track(), 2, 0.4)]) == [0]
    for _ in range(4):
        tempo.target.observe(1, 0.010)
    assert tempo.choose([Candidate(Track(), 2, 0.4)]) == [1]


# acceptance


def test_acceptance_approaches_what_is_observed() -> None:
    acceptance = Acceptance()
    assert acceptance.probability == 0.75
    for _ in range(30):
        acceptance.observe(4, 4)
    assert acceptance.probability > 0.97
    for _ in range(100):
        acceptance.observe(4, 1)  # one accepted, one rejected, and two that nobody knows about
    assert acceptance.probability == pytest.approx(0.5, abs=0.03)


def test_a_draft_accepted_in_full_is_no_failure() -> None:
    acceptance = Acceptance()
    acceptance.observe(1, 1)
    assert acceptance.probability > 0.75
    acceptance.observe(0, 0)
    assert acceptance.probability > 0.75


def test_a_sudden_change_is_believed_soon() -> None:
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.observe(5, 5)
    for _ in range(20):
        acceptance.observe(5, 0)
    assert acceptance.probability < 0.4


def test_a_prior_counts_as_long_as_little_else_is_known() -> None:
    source = Acceptance(memory=256)
    for _ in range(100):
        source.observe(1, 0)
    slot = Acceptance(source)
    assert slot.probability < 0.1
    for _ in range(10):
        slot.observe(4, 4)
    assert slot.probability > 0.9
    assert source.probability > 0.1


def test_long_matches_are_judged_apart_from_short_ones() -> None:
    track = Track()
    for _ in range(20):
        track.watched(4, 4, match_length=20)
        track.watched(4, 0, match_length=3)
    assert track.probability(20) > 0.9
    assert track.probability(3) < 0.2
    assert track.probability(3) < track.probability(7) < track.probability(20)  # nothing is known of 4 to 7 yet


# probes


def run_at_zero(tempo: Tempo, track: Track, tokens: int, accepted: int = 0) -> list[int]:
    """Generate without success; returns the tokens after which there were probes."""
    probes = []
    for generated in range(tokens):
        (n,) = tempo.choose([Candidate(track, 4, track.probability())])
        if track.probing:
            probes.append(generated)
        track.record(1 + min(accepted, n), n, min(accepted, n))
    return probes


def useless() -> Track:
    track = Track()
    for _ in range(50):
        track.record(1, 4, 0)
    return track


def test_the_pauses_between_probes_grow() -> None:
    probes = run_at_zero(flat(row=0.002), useless(), 6000)
    pauses = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert 16 <= probes[0] <= 48
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(1024, abs=2)
    assert len(probes) <= 12


def test_expensive_probes_wait_until_they_are_a_small_part() -> None:
    tempo = flat(row=0.010)
    probes = run_at_zero(tempo, useless(), 1000)
    assert 150 < probes[0] < 250  # two rows cost two tokens, that is 1 % of 200


def test_a_slot_without_a_proposal_cannot_probe() -> None:
    track = useless()
    for _ in range(100):
        assert flat().choose([Candidate(track, 0, 0.1)]) == [0]
        assert not track.probing
        track.record(1, 0, 0)


def test_a_probe_that_is_accepted_is_followed_by_others_until_drafting_pays() -> None:
    tempo, track = flat(row=0.003), useless()
    steps = []
    for _ in range(100):
        (n,) = tempo.choose([Candidate(track, 4, track.probability())])
        steps.append((n, track.probing))
        track.record(1 + n, n, n)
    first = next(index for index, (n, _) in enumerate(steps) if n)
    assert first >= 16
    assert all(n for n, _ in steps[first:])
    assert not any(probing for _, probing in steps[first + 8 :])


def test_accepted_probes_do_not_go_on_where_the_cost_is_the_obstacle() -> None:
    tempo, track = flat(row=0.030), useless()
    probes = run_at_zero(tempo, track, 3000, accepted=4)
    assert len(probes) <= 12
