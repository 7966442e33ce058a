"""Speculation on a fake runner: the text is that without drafts, and the memory ends as it would have."""

from __future__ import annotations

import pytest

from service.engine.batch import DecodeStatus
from service.engine.core import Core
from service.engine.fake import END, FakeDecoder, FakeRunner
from service.engine.sequence import Sequence
from service.engine.settings import DraftSource, SchedulingSettings, SpeculationSettings
from service.engine.types import Delta, DraftOptions, Event, Finished, FinishReason, Request, Sampling, Started
from service.errors import SlotwireError
from tests.engine.test_core import Greedy

MAX_STEPS = 2000
PROMPT = [5, 9, 3]


class Bench:
    """A core that drafts whenever it can: each decode takes a second whatever its rows, a draft no time."""

    def __init__(self, runner: FakeRunner, source: DraftSource = "model", **settings: object) -> None:
        self.runner = runner
        self.now = 0.0
        speculation = SpeculationSettings(draft=source, draft_model=None, **settings)  # type: ignore[arg-type]
        if source != "ngram":
            speculation = SpeculationSettings(draft=source, draft_model="here", **settings)  # type: ignore[arg-type]
        self.core = Core(runner, SchedulingSettings(), speculation, clock=lambda: self.now)
        self.events: dict[str, list[Event | SlotwireError]] = {}
        decode = runner.decode

        def timed(segments: object) -> DecodeStatus:
            self.now += 1
            return decode(segments)  # type: ignore[arg-type]

        runner.decode = timed  # type: ignore[method-assign]

    def submit(self, name: str, prompt: list[int], **options: object) -> None:
        defaults: dict[str, object] = {"sampling": Sampling(temperature=0), "max_tokens": 20}
        request = Request(name, tuple(prompt), **(defaults | options))  # type: ignore[arg-type]
        self.core.submit(Sequence(request, Greedy()))

    def step(self) -> bool:
        worked = self.core.step()
        for name, event in self.core.take_outcomes():
            self.events.setdefault(name, []).append(event)
        return worked

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.step():
                return
        pytest.fail(f"not done after {MAX_STEPS} steps")

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.events[name] if isinstance(event, Delta) for token in event.tokens]

    def finished(self, name: str) -> Finished:
        last = self.events[name][-1]
        assert isinstance(last, Finished), last
        return last

    def memory_is_sound(self) -> None:
        """What the core believes of each slot is what its memory holds."""
        for slot in self.core._slots:
            assert self.runner.memory.get(slot.id, []) == slot.tokens


def runner(
    *, trim: bool = True, wrong_every: int = 3, slots: int = 2, draft_size: int = 512, **options: int
) -> FakeRunner:
    draft = FakeDecoder(size=draft_size, trim=trim, wrong_every=wrong_every)
    defaults = {"capacity": 512, "slot_context": 200}
    return FakeRunner(slots=slots, trim=trim, draft=draft, **(defaults | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("wrong_every", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("streams", [1, 2])
def test_the_text_is_that_without_drafts(trim: bool, wrong_every: int, streams: int) -> None:
    bench = Bench(runner(trim=trim, wrong_every=wrong_every))
    prompts = {f"r{i}": [*PROMPT, 11 + i] for i in range(streams)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, max_tokens=40)
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == bench.runner.expected(prompt, 40)
    bench.memory_is_sound()
    if wrong_every != 1:
        assert bench.finished("r0").speculation.accepted > 0


def test_a_perfect_draft_saves_decodes() -> None:
    bench = Bench(runner(wrong_every=0), draft_max=4)
    bench.submit("a", PROMPT, max_tokens=41)
    bench.run()
    done = bench.finished("a").speculation
    assert (done.drafted, done.accepted) == (done.accepted, sum(done.accepted_at))
    assert done.accepted >= 30
    assert len(bench.runner.decoded) < 15


@pytest.mark.parametrize("trim", [True, False])
def test_the_next_turn_reuses_the_whole_prefix(trim: bool) -> None:
    bench = Bench(runner(trim=trim, wrong_every=4))
    bench.submit("a", PROMPT, max_tokens=23)
    bench.run()
    text = [*PROMPT, *bench.tokens("a")]
    assert bench.core.slots()[0].cached_tokens == len(text) - 1
    bench.submit("b", [*text, 8], max_tokens=3)
    bench.run()
    started = bench.events["b"][0]
    assert isinstance(started, Started)
    assert started.reused_tokens == len(text) - 1
    assert bench.tokens("b") == bench.runner.expected([*text, 8], 3)


def test_decodes_with_checkpoints_are_rounds_and_flushes() -> None:
    bench = Bench(runner(trim=False, wrong_every=3))
    bench.submit("a", PROMPT, max_tokens=60)
    bench.run()
    load = bench.core.load()
    plain = sum(1 for segments in bench.runner.decoded for s in segments if s.outputs == 1 and len(s.tokens) == 1)
    assert load.rounds > 5
    assert load.decodes == 1 + load.rounds + load.flushes + plain  # one for the prompt
    assert len(bench.runner.checkpoints) <= 2
    replayed = bench.finished("a").speculation.replayed
    assert 0 < replayed <= load.replayed_tokens


def test_accepted_tokens_are_computed_again_but_not_verified_again() -> None:
    bench = Bench(runner(trim=False, wrong_every=3))
    bench.submit("a", PROMPT, max_tokens=60)
    bench.run()
    outputs = sum(s.outputs for segments in bench.runner.decoded for s in segments)
    done = bench.finished("a")
    # each output is the draw of a token, or stands behind a rejected one
    assert outputs == 60 + (done.speculation.drafted - done.speculation.accepted)


def test_a_draft_that_is_always_wrong_costs_few_rows() -> None:
    bench = Bench(runner(trim=False, wrong_every=1))
    bench.submit("a", PROMPT, max_tokens=180)
    bench.run()
    assert bench.tokens("a") == bench.runner.expected(PROMPT, 180)
    longest = max(len(s.tokens) for segments in bench.runner.decoded for s in segments)
    assert longest <= 16


def test_rejected_for_fifty_rounds_in_a_row() -> None:
    """Rounds that always fail must neither grow the replay without end nor lose a token."""
    bench = Bench(runner(trim=False, wrong_every=1))
    speculation = bench.core._speculation
    assert speculation is not None
    speculation.tempo.choose = lambda candidates, *_: [min(2, c.limit) for c in candidates]  # type: ignore[method-assign]
    bench.submit("a", PROMPT, max_tokens=150)
    bench.run()
    done = bench.finished("a").speculation
    assert done.rounds >= 50
    assert done.accepted == 0
    assert bench.tokens("a") == bench.runner.expected(PROMPT, 150)
    assert max(len(s.tokens) for segments in bench.runner.decoded for s in segments) <= 16
    bench.memory_is_sound()


def test_end_of_text_in_the_middle_of_a_draft() -> None:
    ended = 0
    for first in range(1, 60):
        bench = Bench(runner(wrong_every=0, vocabulary=64))
        expected = bench.runner.expected([first, 7], 6)
        end = expected[3]
        bench.runner.end_tokens = frozenset({END, end})
        bench.submit("a", [first, 7], max_tokens=40)
        bench.run()
        if expected.index(end) == 3:
            ended += 1
            assert bench.finished("a").reason is FinishReason.END_OF_TEXT
            assert bench.tokens("a") == expected[:3]
            assert bench.core.slots()[0].cached_tokens == 2 + 3
            bench.memory_is_sound()
    assert ended > 20


def test_a_stop_string_in_the_middle_of_a_draft() -> None:
    bench = Bench(runner(wrong_every=0))
    expected = bench.runner.expected(PROMPT, 12)
    pieces = [bench.runner.pieces[token].decode() for token in expected]
    stop = "".join(pieces[4:6])
    bench.submit("a", PROMPT, max_tokens=40, stop=(stop,))
    bench.run()
    done = bench.finished("a")
    text = "".join(e.text for e in bench.events["a"] if isinstance(e, Delta))
    assert (done.reason, done.stop) == (FinishReason.STOP, stop)
    assert text == "".join(pieces)[: "".join(pieces).index(stop)]
    bench.memory_is_sound()
    assert bench.core.slots()[0].cached_tokens == len(PROMPT) + done.usage.generated - 1


@pytest.mark.parametrize("count", range(1, 12))
def test_max_tokens_within_a_draft(count: int) -> None:
    bench = Bench(runner(wrong_every=0), draft_max=4)
    bench.submit("a", PROMPT, max_tokens=count)
    bench.run()
    assert bench.tokens("a") == bench.runner.expected(PROMPT, count)
    assert bench.core.slots()[0].cached_tokens == len(PROMPT) + count - 1


@pytest.mark.parametrize("context", range(12, 20))
@pytest.mark.parametrize("trim", [True, False])
def test_the_context_ends_within_a_draft(context: int, trim: bool) -> None:
    speculating = Bench(runner(wrong_every=0, slot_context=context, trim=trim))
    plain = Bench(runner(wrong_every=0, slot_context=context, trim=trim))
    speculating.submit("a", PROMPT, max_tokens=None)
    plain.submit("a", PROMPT, max_tokens=None, draft=DraftOptions(n_max=0))
    for bench in (speculating, plain):
        bench.run()
        assert bench.finished("a").reason is FinishReason.CONTEXT_FULL
    assert speculating.tokens("a") == plain.tokens("a")
    assert speculating.core.slots()[0].cached_tokens == plain.core.slots()[0].cached_tokens
    assert plain.finished("a").speculation.rounds == 0


def test_drafts_take_no_room_from_others() -> None:
    """With a full cache the draft is dropped, not the idle neighbour."""
    bench = Bench(runner(wrong_every=0, capacity=40, slot_context=30))
    bench.submit("idle", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=4)
    bench.run()
    bench.submit("a", PROMPT, max_tokens=26)
    bench.run()
    assert bench.tokens("a") == bench.runner.expected(PROMPT, 26)
    assert bench.core.slots()[0].cached_tokens == 11


def test_a_draft_context_smaller_than_the_targets() -> None:
    bench = Bench(runner(wrong_every=0, draft_size=30))
    bench.submit("a", PROMPT, max_tokens=60)
    bench.submit("b", [4, 4, 4], max_tokens=60)
    bench.run()
    for name, prompt in (("a", PROMPT), ("b", [4, 4, 4])):
        assert bench.tokens(name) == bench.runner.expected(prompt, 60)
    assert bench.finished("a").speculation.accepted > 0


def test_cancel_between_two_rounds_leaves_a_sound_slot() -> None:
    bench = Bench(runner(trim=False, wrong_every=4))
    bench.submit("a", PROMPT, max_tokens=60)
    bench.submit("b", [4, 4, 4], max_tokens=30)
    for _ in range(6):
        bench.step()
    bench.core.cancel("a")
    bench.run()
    assert bench.tokens("b") == bench.runner.expected([4, 4, 4], 30)
    held = bench.core._slots[0].tokens
    assert held == [*PROMPT, *bench.runner.expected(PROMPT, 60)][: len(held)]
    bench.memory_is_sound()


def test_a_prompt_beside_rounds() -> None:
    bench = Bench(runner(trim=False, wrong_every=4))
    bench.submit("a", PROMPT, max_tokens=60)
    for _ in range(5):
        bench.step()
    long = [1 + i % 50 for i in range(90)]
    bench.submit("b", long, max_tokens=20)
    bench.run()
    assert bench.tokens("a") == bench.runner.expected(PROMPT, 60)
    assert bench.tokens("b") == bench.runner.expected(long, 20)


def test_off_for_one_request_and_on_for_the_next() -> None:
    bench = Bench(runner(wrong_every=5))
    history = list(PROMPT)
    for turn in range(6):
        n_max = None if turn % 2 else 0
        bench.submit(f"t{turn}", history, max_tokens=12, draft=DraftOptions(n_max=n_max))
        bench.run()
        assert bench.tokens(f"t{turn}") == bench.runner.expected(history, 12)
        assert (bench.finished(f"t{turn}").speculation.rounds > 0) == (n_max is None)
        history += [*bench.tokens(f"t{turn}"), 8]


def test_off_on_one_slot_leaves_the_other_speculating() -> None:
    bench = Bench(runner(wrong_every=0))
    bench.submit("off", PROMPT, max_tokens=30, draft=DraftOptions(n_max=0))
    bench.submit("on", [4, 4, 4], max_tokens=30)
    bench.run()
    assert bench.finished("off").speculation.drafted == 0
    assert bench.finished("on").speculation.accepted > 10


def test_the_options_bound_a_draft() -> None:
    bench = Bench(runner(wrong_every=0))
    bench.submit("a", PROMPT, max_tokens=30, draft=DraftOptions(n_max=2))
    bench.run()
    assert len(bench.finished("a").speculation.accepted_at) == 2
    bench.submit("b", PROMPT, max_tokens=30, draft=DraftOptions(p_min=0.99))  # the fake's best has far less
    bench.submit("c", PROMPT, max_tokens=30, draft=DraftOptions(n_min=40))
    bench.run()
    assert bench.finished("b").speculation.rounds == bench.finished("c").speculation.rounds == 0


def test_ngrams_draft_what_repeats() -> None:
    bench = Bench(FakeRunner(slots=1, capacity=512, slot_context=256), "ngram")
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    prompt = text * 8
    bench.submit("a", prompt, max_tokens=60)
    bench.run()
    assert bench.tokens("a") == bench.runner.expected(prompt, 60)
    bench.memory_is_sound()


def test_a_failed_draft_decode_ends_drafts_not_the_request() -> None:
    bench = Bench(runner(wrong_every=0), draft_max=2)
    bench.submit("a", PROMPT, max_tokens=30)
    for _ in range(3):
        bench.step()
    assert isinstance(bench.runner.draft, FakeDecoder)
    bench.runner.draft.statuses = [DecodeStatus.FAILED] * 3
    bench.run()
    assert bench.tokens("a") == bench.runner.expected(PROMPT, 30)
    assert bench.runner.draft.statuses == []
