"""The client against a server on loopback: what it sends, what it makes of the answers, how it stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

import slotwire_client as sw
from slotwire.v1 import system_pb2
from tests.unit.fake_server import FakeServer, running

LIMIT = 10.0
"""Seconds for anything that must happen."""


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
async def client(fake: FakeServer) -> AsyncIterator[sw.Client]:
    async with asyncio.timeout(LIMIT), running(fake) as address, sw.Client(address) as connected:
        yield connected


async def test_iterating_gives_the_text_in_pieces_and_then_the_result(client: sw.Client) -> None:
    generation = client.generate("Tell", seed=7, slot_id=1)

    assert [text async for text in generation] == ["Once", " upon", " a", " time"]
    assert generation.result == sw.GenerationResult(
        text="Once upon a time",
        token_ids=(100, 101, 102, 103),
        logprobs=(),
        reason=sw.FinishReason.STOP,
        stop="!",
        usage=sw.Usage(prompt_tokens=5, reused_tokens=3, generated_tokens=4),
        timings=None,
        request_id="r1",
        slot_id=1,
        seed=7,
    )


async def test_events_come_in_order_and_typed(client: sw.Client) -> None:
    generation = client.generate("Tell", progress=True, timings=True, logprobs=1)

    events = [event async for event in generation.events()]

    assert events[0] == sw.Started("r1", slot_id=2, prompt_tokens=5, reused_tokens=3, seed=99)
    assert events[1] == sw.Progress(5, 5)
    entry = sw.LogprobEntry(100, -0.5, b"Once")
    assert events[2] == sw.Delta("Once", (100,), (sw.TokenLogprob(entry, (entry,)),))
    assert isinstance(events[-1], sw.Finished)
    assert events[-1].timings == sw.Timings(0.001, 0.02, 0.3)
    assert len(generation.result.logprobs) == 4


async def test_a_second_iteration_goes_on_where_the_first_stopped(client: sw.Client) -> None:
    generation = client.generate("Tell")
    async for text in generation:
        assert text == "Once"
        break

    assert [text async for text in generation] == [" upon", " a", " time"]
    assert (await generation.complete()).text == "Once upon a time"


async def test_there_is_no_result_before_the_end(client: sw.Client) -> None:
    async with client.generate("Tell") as generation:
        assert not generation.finished
        with pytest.raises(RuntimeError, match="read to its end"):
            _ = generation.result


async def test_leaving_the_context_early_cancels_the_call(client: sw.Client, fake: FakeServer) -> None:
    fake.hold_after = 2
    async with client.generate("Tell") as generation:
        async for _ in generation:
            break

    await fake.cancelled.wait()


async def test_cancelling_the_reading_task_cancels_the_call(client: sw.Client, fake: FakeServer) -> None:
    fake.hold_after = 1
    task = asyncio.create_task(client.generate("Tell").complete())
    await fake.holding.wait()

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    await fake.cancelled.wait()


async def test_cancel_ends_the_reading_with_an_error_and_keeps_the_text(client: sw.Client, fake: FakeServer) -> None:
    fake.hold_after = 1
    generation = client.generate("Tell")
    assert await anext(generation) == "Once"
    reader = asyncio.create_task(generation.complete())
    await fake.holding.wait()

    generation.cancel()

    with pytest.raises(sw.Cancelled):
        await reader
    await fake.cancelled.wait()
    assert generation.text == "Once"
    assert not generation.finished


async def test_the_timeout_ends_the_call_on_both_sides(client: sw.Client, fake: FakeServer) -> None:
    fake.hold_after = 0
    with pytest.raises(sw.DeadlineExceeded):
        await client.generate("Tell", timeout=0.3).complete()
    await fake.cancelled.wait()


async def test_a_stream_without_its_last_event_is_an_error(client: sw.Client, fake: FakeServer) -> None:
    fake.truncate = True
    with pytest.raises(sw.DataLoss):
        await client.generate("Tell").complete()


async def test_options_reach_the_server_as_given(client: sw.Client, fake: FakeServer) -> None:
    await client.generate(
        "Tell",
        max_tokens=9,
        temperature=0.5,
        top_k=0,
        xtc=sw.Xtc(probability=0.25),
        dry=sw.Dry(multiplier=1.0, sequence_breakers=("\n",)),
        penalties=sw.Penalties(repeat=1.5),
        logit_bias={3: -1.0},
        stop=("\n", "END"),
        time_limit=1.5,
        session="s",
        cache_key="k",
        reuse_prefix=False,
        json_schema={"type": "object"},
        add_special=False,
    ).complete()

    (request,) = fake.requests
    assert request.prompt.text.text == "Tell"
    assert request.prompt.text.HasField("add_special")
    assert (request.max_tokens, list(request.stop)) == (9, ["\n", "END"])
    assert request.time_limit == Duration(seconds=1, nanos=500_000_000)
    assert (request.session, request.cache_key, request.reuse_prefix) == ("s", "k", False)
    sampling = request.sampling
    assert sampling.temperature == 0.5
    assert sampling.HasField("top_k")
    assert not sampling.HasField("top_p")
    assert (sampling.xtc.probability, sampling.xtc.HasField("threshold")) == (0.25, False)
    assert list(sampling.dry.sequence_breakers) == ["\n"]
    assert sampling.penalties.repeat == 1.5
    assert dict(sampling.logit_bias) == {3: -1.0}
    assert json.loads(sampling.grammar.json_schema) == {"type": "object"}


async def test_what_is_left_out_is_not_sent(client: sw.Client, fake: FakeServer) -> None:
    await client.generate([5, 6], temperature=None, max_tokens=None).complete()

    assert list(fake.requests[0].prompt.tokens.ids) == [5, 6]
    assert [descriptor.name for descriptor, _ in fake.requests[0].ListFields()] == ["prompt"]


async def test_a_value_outside_the_contract_is_refused_by_name(client: sw.Client) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        client.generate("Tell", max_tokens=-1)
    with pytest.raises(TypeError, match=r"penalties\.repeat"):
        client.generate("Tell", penalties=sw.Penalties(repeat="much"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="add_special does not go with"):
        client.generate([1], add_special=True)
    with pytest.raises(TypeError, match="unknown option: top"):
        client.generate("Tell", top=1)  # type: ignore[call-arg]


async def test_a_chat_keeps_the_messages_and_its_session(client: sw.Client, fake: FakeServer) -> None:
    chat = client.chat(system="Be brief.")

    await chat.send("Hello").complete()
    await chat.send("More", max_tokens=5).complete()

    first, second = fake.requests
    assert first.session == second.session == chat.session
    assert [(m.role, m.content) for m in second.prompt.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", "Once upon a time"),
        ("user", "More"),
    ]
    assert chat.messages[-1] == sw.ChatMessage("assistant", "Once upon a time")


async def test_an_answer_that_was_stopped_changes_nothing(client: sw.Client, fake: FakeServer) -> None:
    fake.hold_after = 2
    chat = client.chat()
    async with chat.send("Hello") as answer:
        async for _ in answer:
            break

    assert chat.messages == []


async def test_error_details_are_decoded(client: sw.Client, fake: FakeServer) -> None:
    fake.failure = (
        grpc.StatusCode.INVALID_ARGUMENT,
        (
            error_details_pb2.ErrorInfo(reason="INVALID_FIELD", domain="slotwire", metadata={"limit": "64"}),
            error_details_pb2.BadRequest(
                field_violations=[error_details_pb2.BadRequest.FieldViolation(field="stop", description="too many")]
            ),
        ),
    )

    with pytest.raises(sw.InvalidArgument) as caught:
        await client.generate("Tell").complete()

    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.message, error.reason, dict(error.metadata)) == ("it failed", "INVALID_FIELD", {"limit": "64"})
    assert error.violations == (sw.FieldViolation("stop", "too many"),)
    assert error.retry_after is None
    assert error.request_id == "request-7"


async def test_the_time_to_wait_is_decoded(client: sw.Client, fake: FakeServer) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000))
    fake.failure = (grpc.StatusCode.RESOURCE_EXHAUSTED, (retry,))

    with pytest.raises(sw.ResourceExhausted) as caught:
        await client.list_slots()

    assert caught.value.retry_after == 2.5


@pytest.mark.parametrize("kind", sw.SlotwireError.__subclasses__())
async def test_every_status_has_its_class(client: sw.Client, fake: FakeServer, kind: type[sw.SlotwireError]) -> None:
    fake.failure = (kind.code, ())
    with pytest.raises(kind) as caught:
        await client.load()
    assert type(caught.value) is kind


async def test_no_server_is_unavailable_without_a_reason() -> None:
    async with asyncio.timeout(LIMIT), sw.Client("127.0.0.1:1") as client:
        with pytest.raises(sw.Unavailable) as caught:
            await client.server_info()
    assert caught.value.reason is None


async def test_tokens_go_both_ways(client: sw.Client) -> None:
    assert await client.tokenize("é") == (0xC3, 0xA9)
    assert await client.tokenize(b"a") == (97,)
    assert await client.tokenize_with_pieces("ab") == (sw.Token(97, b"a"), sw.Token(98, b"b"))
    assert await client.detokenize([0x61, 0xC3]) == "a\ufffd"
    assert await client.detokenize_bytes([0x61, 0xC3]) == b"a\xc3"
    rendered = await client.render_chat([sw.ChatMessage("user", "Hi")])
    assert rendered.text == "<user>Hi"


async def test_slots_and_system_are_typed(client: sw.Client) -> None:
    idle, busy = await client.list_slots()
    assert (idle.state, idle.session, idle.last_used) == (sw.SlotState.IDLE, None, None)
    assert (busy.state, busy.session, busy.cached_tokens) == (sw.SlotState.GENERATING, "alpha", 120)
    assert busy.last_used is not None
    assert busy.last_used.timestamp() == 1_700_000_000
    assert await client.get_slot(1) == busy
    assert await client.erase_slot(1) == 120
    assert (await client.server_info()).state is sw.ServerState.READY
    assert (await client.load()).step_seconds == pytest.approx(0.012)
    model = await client.model_info()
    assert model.capabilities.chat
    assert model.sampling_defaults == {
        "temperature": 0.8,
        "top_k": 40,
        "xtc": sw.Xtc(probability=0.0, threshold=0.1),
    }


async def test_the_token_is_sent_with_every_call(fake: FakeServer) -> None:
    async with asyncio.timeout(LIMIT), running(fake) as address, sw.Client(address, token="secret") as client:
        await client.load()
        assert fake.metadata["authorization"] == "Bearer secret"
        fake.metadata = {}
        await client.generate("Tell").complete()
        assert fake.metadata["authorization"] == "Bearer secret"


async def test_wait_ready_returns_when_the_server_serves(client: sw.Client, fake: FakeServer) -> None:
    fake.states = [(system_pb2.SERVER_STATE_LOADING, 0.5)]
    await fake.set_serving(False)
    waiting = asyncio.create_task(client.wait_ready(timeout=LIMIT))
    assert not waiting.done()

    await fake.set_serving(True)

    await waiting


async def test_wait_ready_gives_up_on_a_failed_server(client: sw.Client, fake: FakeServer) -> None:
    fake.states = [(system_pb2.SERVER_STATE_FAILED, 0.5)]
    await fake.set_serving(False)
    with pytest.raises(sw.Unavailable, match="failed to load"):
        await client.wait_ready(timeout=LIMIT)


async def test_wait_ready_has_a_limit_where_there_is_no_server() -> None:
    async with asyncio.timeout(LIMIT), sw.Client("127.0.0.1:1") as client:
        with pytest.raises(sw.DeadlineExceeded):
            await client.wait_ready(timeout=0.2)
