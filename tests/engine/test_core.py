"""The engine on a fake runner: who gets which slot, who computes what, and how requests end."""

from __future__ import annotations

import numpy as np
import pytest

from service.engine.batch import DecodeStatus, Logits
from service.engine.core import Core
from service.engine.fake import FakeRunner
from service.engine.sequence import Sequence
from service.engine.settings import SchedulingSettings
from service.engine.types import (
    Delta,
    Event,
    Finished,
    FinishReason,
    Progress,
    Request,
    Sampling,
    SlotState,
    Started,
)
from service.errors import Conflict, DeadlineExceeded, EngineFailure, Exhausted, SlotwireError

MAX_STEPS = 1000


class Greedy:
    """Draws the largest logit, and remembers whether it was closed."""

    def __init__(self) -> None:
        self.closed = 0
        self.error: SlotwireError | None = None

    def draw(self, logits: Logits) -> int:
        if self.error:
            raise self.error
        return int(logits.argmax())

    def close(self) -> None:
        self.closed += 1


class Bench:
    """A core with its runner, a clock that only moves when told to, and the outcomes by request."""

    def __init__(self, runner: FakeRunner | None = None, **settings: object) -> None:
        self.runner = runner or FakeRunner()
        self.now = 100.0
        self.core = Core(self.runner, SchedulingSettings(**settings), clock=lambda: self.now)  # type: ignore[arg-type]
        self.events: dict[str, list[Event | SlotwireError]] = {}
        self.samplers: dict[str, Greedy] = {}

    def submit(self, name: str, tokens: list[int], **options: object) -> None:
        defaults: dict[str, object] = {"sampling": Sampling(temperature=0), "max_tokens": 4, "arrived": self.now}
        request = Request(name, tuple(tokens), **(defaults | options))  # type: ignore[arg-type]
        self.samplers[name] = Greedy()
        self.core.submit(Sequence(request, self.samplers[name]))
        self.collect()

    def step(self) -> bool:
        worked = self.core.step()
        self.collect()
        return worked

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.step():
                return
        pytest.fail(f"not done after {MAX_STEPS} steps")

    def collect(self) -> None:
        for name, event in self.core.take_outcomes():
            self.events.setdefault(name, []).append(event)

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.events[name] if isinstance(event, Delta) for token in event.tokens]

    def last(self, name: str) -> Event | SlotwireError:
        return self.events[name][-1]

    def started(self, name: str) -> Started:
        first = self.events[name][0]
        assert isinstance(first, Started)
        return first

    def reason(self, name: str) -> FinishReason:
        last = self.last(name)
        assert isinstance(last, Finished), last
        return last.reason


def test_a_request_streams_its_tokens_and_ends_with_its_usage() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3], max_tokens=5)
    bench.run()
    assert bench.tokens("a") == bench.runner.expected([1, 2, 3], 5)
    last = bench.last("a")
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.prompt, last.usage.generated) == (FinishReason.LENGTH, 3, 5)
    assert bench.samplers["a"].closed


def test_the_text_does_not_depend_on_the_neighbours() -> None:
    bench = Bench(FakeRunner(slots=4, capacity=128))
    prompts = {f"r{i}": [i + 1, 5, 9 + i, 3] for i in range(10)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, max_tokens=6)
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == bench.runner.expected(prompt, 6)


def test_generating_slots_and_prompts_share_one_decode() -> None:
    bench = Bench()
    bench.submit("a", [1, 2], max_tokens=8)
    bench.step()
    bench.submit("b", [3, 4], max_tokens=8)
    bench.step()
    assert [(s.slot, len(s.tokens)) for s in bench.runner.decoded[-1]] == [(0, 1), (1, 2)]


def test_a_long_prompt_goes_in_chunks_and_reports_its_progress() -> None:
    bench = Bench(FakeRunner(slot_context=64))
    bench.submit("a", list(range(1, 41)), max_tokens=1, progress=True)
    bench.run()
    progress = [event for event in bench.events["a"] if isinstance(event, Progress)]
    assert progress == [Progress(16, 40), Progress(32, 40), Progress(40, 40)]


def test_a_conversation_reuses_the_state_of_its_slot() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3], max_tokens=4)
    bench.run()
    history = [1, 2, 3, *bench.tokens("a")]
    bench.submit("b", [*history, 8], max_tokens=2)
    bench.run()
    assert bench.started("b") == Started(slot_id=0, prompt_tokens=8, reused_tokens=6)  # the last was never computed
    assert bench.tokens("b") == bench.runner.expected([*history, 8], 2)


@pytest.mark.parametrize(
    "options", [{"reuse_prefix": False}, {"cache_key": "other"}], ids=["switched-off", "other-cache-key"]
)
def test_nothing_is_reused(options: dict[str, object]) -> None:
    bench = Bench(FakeRunner(slots=1))
    bench.submit("a", [1, 2, 3], cache_key="one")
    bench.run()
    bench.submit("b", [1, 2, 3, 4], **({"cache_key": "one"} | options))
    bench.run()
    assert bench.started("b").reused_tokens == 0
    assert bench.tokens("b") == bench.runner.expected([1, 2, 3, 4], 4)


def test_memory_that_cannot_be_trimmed_is_reused_whole_or_not_at_all() -> None:
    bench = Bench(FakeRunner(slots=1, trim=False))
    bench.submit("a", [1, 2, 3], max_tokens=3)
    bench.run()
    held = [1, 2, 3, *bench.tokens("a")][:-1]
    bench.submit("whole", [*held, 9], max_tokens=1)
    bench.run()
    assert bench.started("whole").reused_tokens == len(held)
    bench.submit("part", [*held[:-1], 9], max_tokens=3)
    bench.run()
    assert bench.started("part").reused_tokens == 0
    assert bench.tokens("part") == bench.runner.expected([*held[:-1], 9], 3)


def test_the_asked_slot_is_used_and_waited_for() -> None:
    bench = Bench()
    bench.submit("a", [1, 2], slot_id=1, max_tokens=4)
    bench.submit("b", [3, 4], slot_id=1, max_tokens=4)
    bench.step()
    assert bench.started("a").slot_id == 1
    assert "b" not in bench.events
    bench.run()
    assert bench.started("b").slot_id == 1


def test_a_session_keeps_its_slot_even_if_another_is_idle() -> None:
    bench = Bench()
    bench.submit("a", [1, 2], session="s", slot_id=1, max_tokens=2)
    bench.run()
    bench.submit("b", [50, 51], session="s", max_tokens=4)
    bench.submit("c", [60, 61], session="s", max_tokens=4)
    bench.step()
    assert bench.started("b").slot_id == 1
    assert "c" not in bench.events
    bench.run()
    assert bench.started("c").slot_id == 1


def test_a_new_conversation_takes_the_empty_slot_then_the_oldest() -> None:
    bench = Bench()
    for name, prompt in (("a", [1, 2, 3]), ("b", [20, 21]), ("c", [30, 31])):
        bench.submit(name, prompt, max_tokens=2)
        bench.run()
    assert [bench.started(name).slot_id for name in "abc"] == [0, 1, 0]


def test_a_conversation_is_not_overwritten_for_a_short_common_prefix() -> None:
    bench = Bench()
    bench.submit("a", [1, *range(10, 20)], max_tokens=2)
    bench.run()
    bench.submit("b", [1, 40, 41], max_tokens=2)
    bench.run()
    assert bench.started("b") == Started(slot_id=1, prompt_tokens=3, reused_tokens=0)


def test_the_queue_has_a_bound() -> None:
    bench = Bench(queue=2)
    for name in "abc":
        bench.submit(name, [1, 2])
    error = bench.last("c")
    assert isinstance(error, Exhausted)
    assert (error.reason, error.metadata["limit"]) == ("QUEUE_FULL", "2")
    assert bench.samplers["c"].closed


def test_a_cancelled_request_leaves_before_the_next_step() -> None:
    bench = Bench(FakeRunner(slots=1))
    bench.submit("a", [1, 2], max_tokens=20)
    bench.submit("b", [3, 4], max_tokens=2)
    bench.submit("c", [5, 6], max_tokens=2)
    bench.step()
    bench.core.cancel("a")
    bench.core.cancel("c")
    bench.core.cancel("nobody")
    bench.step()
    assert bench.started("b").slot_id == 0
    bench.run()
    assert bench.reason("b") is FinishReason.LENGTH
    assert "c" not in bench.events
    assert all(sampler.closed for sampler in bench.samplers.values())


def test_time_limits_end_the_text_and_deadlines_the_request() -> None:
    bench = Bench(FakeRunner(slots=2))
    bench.submit("limit", [1, 2], max_tokens=20, time_limit_at=105.0)
    bench.submit("deadline", [3, 4], max_tokens=20, deadline_at=105.0)
    bench.submit("queued", [5, 6], time_limit_at=105.0)
    bench.step()
    bench.now = 105.0
    bench.step()
    assert bench.reason("limit") is FinishReason.TIME_LIMIT
    assert isinstance(bench.last("deadline"), DeadlineExceeded)
    assert bench.reason("queued") is FinishReason.TIME_LIMIT
    assert all(slot.state is SlotState.IDLE for slot in bench.core.slots())


def test_timings_tell_queue_prompt_and_generation_apart() -> None:
    bench = Bench(FakeRunner(slots=1))
    bench.submit("a", [1, 2], max_tokens=3)
    bench.now += 2
    bench.step()
    bench.now += 5
    bench.run()
    last = bench.last("a")
    assert isinstance(last, Finished)
    assert (last.timings.queue, last.timings.prompt, last.timings.generation) == (2, 0, 5)


def test_the_text_ends_where_the_context_is_full() -> None:
    bench = Bench(FakeRunner(slot_context=8))
    bench.submit("a", [1, 2, 3], max_tokens=None)
    bench.run()
    assert bench.reason("a") is FinishReason.CONTEXT_FULL
    assert len(bench.tokens("a")) == 6  # five of them computed, the last one drawn


def test_the_end_token_is_not_text_and_ends_it() -> None:
    runner = FakeRunner()
    bench = Bench(runner)
    bench.submit("a", [1, 2], max_tokens=50)
    scores = np.zeros(64, np.float32)
    bench.step()
    runner.logits = lambda index: scores  # type: ignore[method-assign]  # argmax 0 is the end
    bench.run()
    assert bench.reason("a") is FinishReason.END_OF_TEXT
    assert bench.tokens("a") == runner.expected([1, 2], 1)


def test_a_full_cache_costs_idle_slots_first() -> None:
    bench = Bench(FakeRunner(slots=3, capacity=24, slot_context=24))
    for name, prompt in (("old", [1, 2, 3, 4, 5, 6]), ("new", [20, 21, 22, 23])):
        bench.submit(name, prompt, max_tokens=1)
        bench.run()
    bench.submit("a", [40] * 12, max_tokens=6)
    bench.run()
    assert bench.reason("a") is FinishReason.LENGTH
    assert bench.tokens("a") == bench.runner.expected([40] * 12, 6)
    assert [slot.cached_tokens for slot in bench.core.slots()] == [0, 4, 17]  # the older one went


def test_a_full_cache_then_ends_the_newest_request_only() -> None:
    bench = Bench(FakeRunner(slots=2, capacity=20, slot_context=20))
    bench.submit("first", [1, 2, 3, 4], max_tokens=12)
    bench.submit("second", [5, 6, 7, 8], max_tokens=12)
    bench.run()
    error = bench.last("second")
    assert isinstance(error, Exhausted)
    assert error.reason == "CACHE_FULL"
    assert bench.reason("first") is FinishReason.LENGTH
    assert bench.tokens("first") == bench.runner.expected([1, 2, 3, 4], 12)


def test_a_prompt_without_room_waits_and_is_not_overtaken() -> None:
    bench = Bench(FakeRunner(slots=3, capacity=20, slot_context=20))
    bench.submit("a", [1] * 8, max_tokens=4)
    bench.submit("large", [2] * 12, max_tokens=2)
    bench.submit("small", [3] * 2, max_tokens=2)
    bench.step()
    assert set(bench.events) == {"a"}
    bench.run()
    assert bench.reason("large") is FinishReason.LENGTH
    assert bench.reason("small") is FinishReason.LENGTH


def test_a_failed_decode_ends_those_in_the_batch_and_the_engine_goes_on() -> None:
    bench = Bench()
    bench.submit("a", [1, 2])
    bench.step()
    bench.runner.statuses = [DecodeStatus.FAILED]
    bench.step()
    assert isinstance(bench.last("a"), EngineFailure)
    bench.submit("b", [1, 2])
    bench.run()
    assert bench.tokens("b") == bench.runner.expected([1, 2], 4)


def test_a_sampler_that_fails_costs_only_its_own_request() -> None:
    bench = Bench()
    bench.submit("a", [1, 2])
    bench.submit("b", [3, 4])
    bench.samplers["a"].error = EngineFailure("dead end", reason="GRAMMAR_DEAD_END")
    bench.run()
    assert isinstance(bench.last("a"), EngineFailure)
    assert bench.tokens("b") == bench.runner.expected([3, 4], 4)


def test_erase_empties_an_idle_slot_and_refuses_a_busy_one() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3], session="s", max_tokens=4)
    bench.step()
    with pytest.raises(Conflict) as caught:
        bench.core.erase(0)
    assert caught.value.reason == "SLOT_BUSY"
    bench.run()
    assert bench.core.erase(0) == 6
    assert bench.core.slots()[0].cached_tokens == 0
    assert bench.core.slots()[0].session is None
    assert bench.runner.memory[0] == []


def test_fail_all_ends_everyone_and_empties_everything() -> None:
    bench = Bench(FakeRunner(slots=1))
    bench.submit("a", [1, 2], max_tokens=20)
    bench.submit("b", [3, 4])
    bench.step()
    bench.core.fail_all(EngineFailure("over"))
    bench.collect()
    assert isinstance(bench.last("a"), EngineFailure)
    assert isinstance(bench.last("b"), EngineFailure)
    assert not bench.step()
    assert bench.core.slots()[0].cached_tokens == 0


def test_the_load_counts_what_was_done() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3], max_tokens=4)
    bench.run()
    load = bench.core.load()
    assert (load.requests, load.prompt_tokens, load.generated_tokens, load.steps) == (1, 3, 4, 4)
    assert load.cached_tokens == 6
