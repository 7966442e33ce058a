"""The engine's thread on a fake runner: what reaches the event loop, and what happens when things go wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from service.engine.batch import DecodeStatus, Segment
from service.engine.core import Core
from service.engine.fake import FakeRunner
from service.engine.llama.samplers import GreedySampler
from service.engine.loop import Engine
from service.engine.outbox import Outbox
from service.engine.settings import SchedulingSettings
from service.engine.types import Delta, Event, Finished, Request, Sampling, Started
from service.errors import ConfigError, EngineFailure, Exhausted, Unavailable

LIMIT = 10.0  # seconds; nothing here takes a tenth of it


class GatedRunner(FakeRunner):
    """Decodes only while its gate is open, so that a test decides what happens between two steps."""

    def __init__(self) -> None:
        super().__init__(slots=2, capacity=4096, slot_context=2048)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.broken = False

    def decode(self, segments: Sequence[Segment]) -> DecodeStatus:
        self.entered.set()
        assert self.gate.wait(LIMIT)
        if self.broken:
            self.broken = False
            raise RuntimeError("broken on purpose")
        return super().decode(segments)


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
async def engine(runner: GatedRunner) -> AsyncIterator[Engine[GatedRunner]]:
    engine = Engine(lambda: runner, SchedulingSettings(outbox_tokens=256))
    await engine.start()
    yield engine
    runner.gate.set()
    async with asyncio.timeout(LIMIT):
        await engine.close()


def request(name: str, tokens: Sequence[int] = (1, 2, 3), max_tokens: int = 4) -> Request:
    return Request(name, tuple(tokens), Sampling(temperature=0), max_tokens=max_tokens)


async def drain(outbox: Outbox) -> list[Event]:
    events: list[Event] = []
    async with asyncio.timeout(LIMIT):
        while not events or not isinstance(events[-1], Finished):
            events.append(await outbox.get())
    return events


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


async def test_concurrent_requests_all_arrive_whole(engine: Engine[GatedRunner], runner: GatedRunner) -> None:
    outboxes = [engine.submit(request(f"r{i}", (i + 1, 2), 8), GreedySampler()) for i in range(12)]
    for index, events in enumerate(await asyncio.gather(*map(drain, outboxes))):
        assert isinstance(events[0], Started)
        assert tokens(events) == runner.expected((index + 1, 2), 8)


async def test_one_wakeup_a_step_serves_all_requests(engine: Engine[GatedRunner], runner: GatedRunner) -> None:
    runner.gate.clear()
    first = engine.submit(request("a", max_tokens=6), GreedySampler())
    second = engine.submit(request("b", max_tokens=6), GreedySampler())
    wakeups = 0
    loop = asyncio.get_running_loop()
    post = loop.call_soon_threadsafe

    def counting(callback: object, *args: object, **kwargs: object) -> object:
        nonlocal wakeups
        wakeups += 1
        return post(callback, *args, **kwargs)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counting  # type: ignore[assignment,method-assign]
    runner.gate.set()
    await asyncio.gather(drain(first), drain(second))
    assert wakeups <= len(runner.decoded)


async def test_a_reader_that_is_late_gets_merged_deltas(engine: Engine[GatedRunner], runner: GatedRunner) -> None:
    outbox = engine.submit(request("a", max_tokens=40), GreedySampler())
    async with asyncio.timeout(LIMIT):
        while (await engine.call(Core.load)).generated_tokens < 40:
            pass
    events = await drain(outbox)
    assert [type(event) for event in events] == [Started, Delta, Finished]
    assert tokens(events) == runner.expected((1, 2, 3), 40)


async def test_a_reader_that_stops_is_cut_off_without_harm_to_others(
    engine: Engine[GatedRunner], runner: GatedRunner
) -> None:
    stalled = engine.submit(request("stalled", (9, 9), 1000), GreedySampler())
    other = engine.submit(request("other", (1, 2, 3), 200), GreedySampler())
    assert tokens(await drain(other)) == runner.expected((1, 2, 3), 200)
    async with asyncio.timeout(LIMIT):
        while (await engine.call(Core.load)).busy_slots:
            pass
    with pytest.raises(Exhausted) as caught:
        await stalled.get()
    assert caught.value.reason == "SLOW_READER"


async def test_cancelling_frees_the_slot_before_the_next_step(engine: Engine[GatedRunner], runner: GatedRunner) -> None:
    runner.gate.clear()
    engine.submit(request("a", max_tokens=1000), GreedySampler())
    await asyncio.to_thread(runner.entered.wait, LIMIT)
    engine.cancel("a")
    runner.gate.set()
    load = await engine.call(Core.load)
    assert load.busy_slots == 0
    assert load.steps == 1


async def test_a_step_that_raises_ends_its_requests_and_not_the_engine(
    engine: Engine[GatedRunner], runner: GatedRunner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.broken = True
    outbox = engine.submit(request("a"), GreedySampler())
    with pytest.raises(EngineFailure) as caught:
        await drain(outbox)
    assert caught.value.metadata["incident"] in caplog.text
    assert "broken on purpose" not in caught.value.message
    assert tokens(await drain(engine.submit(request("b"), GreedySampler()))) == runner.expected((1, 2, 3), 4)


async def test_a_command_that_raises_raises_for_its_caller(engine: Engine[GatedRunner]) -> None:
    def fail(_core: Core) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await engine.call(fail)


async def test_closing_ends_requests_and_frees_the_model(runner: GatedRunner) -> None:
    engine = Engine(lambda: runner, SchedulingSettings())
    await engine.start()
    runner.gate.clear()
    outbox = engine.submit(request("a", max_tokens=1000), GreedySampler())
    closing = asyncio.create_task(engine.close())
    await asyncio.to_thread(runner.entered.wait, LIMIT)
    runner.gate.set()
    async with asyncio.timeout(LIMIT):
        await closing
    with pytest.raises(Unavailable):
        await drain(outbox)
    assert runner.closed
    with pytest.raises(Unavailable):
        engine.submit(request("b"), GreedySampler())
    with pytest.raises(Unavailable):
        await engine.call(Core.load)


async def test_a_model_that_cannot_be_loaded_says_why() -> None:
    def load() -> FakeRunner:
        raise ConfigError("model: no such file")

    engine = Engine(load, SchedulingSettings())
    with pytest.raises(ConfigError, match="no such file"):
        await engine.start()
    async with asyncio.timeout(LIMIT):
        await engine.close()
