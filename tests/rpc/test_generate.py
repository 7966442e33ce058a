"""Generate over a loopback server on the tiny hybrid model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from service.server import Server
from slotwire.v1 import generation_pb2 as pb
from slotwire.v1 import generation_pb2_grpc as pb_grpc
from slotwire.v1 import sampling_pb2 as sp
from slotwire.v1 import slot_pb2, slot_pb2_grpc
from tests.conftest import LIMIT, serving, settings

PROMPT = "The :func:`open` function returns a file object. If the argument is a string, then"
GREEDY = sp.SamplingOptions(temperature=0)


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> pb_grpc.GenerationServiceAsyncStub:
    return pb_grpc.GenerationServiceStub(channel)


def request(text: str = PROMPT, **fields: object) -> pb.GenerateRequest:
    defaults: dict[str, object] = {"sampling": GREEDY, "max_tokens": 24}
    return pb.GenerateRequest(prompt=pb.Prompt(text=pb.TextPrompt(text=text)), **(defaults | fields))  # type: ignore[arg-type]


async def collect(
    stub: pb_grpc.GenerationServiceAsyncStub, message: pb.GenerateRequest, deadline: float = LIMIT
) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(message, timeout=deadline)]


def text_of(responses: Sequence[pb.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


def ids_of(responses: Sequence[pb.GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.delta.token_ids]


async def test_a_stream_is_started_deltas_finished(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    responses = await collect(stub, request(timings=True))
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"delta"}
    assert responses[0].started.prompt_tokens == 21
    finished = responses[-1].finished
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert finished.usage.generated_tokens == len(ids_of(responses)) == 24
    assert finished.timings.prompt.ToNanoseconds() > 0
    assert finished.timings.generation.ToNanoseconds() > 0


async def test_the_text_is_that_of_llama_server(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    """The continuation that a real llama-server gave for this model and prompt, greedy."""
    first = await collect(stub, request(session="s"))
    whole = PROMPT + text_of(first) + " The"
    second = await collect(stub, request(whole, session="s"))
    assert second[0].started.reused_tokens == 44
    assert (
        text_of(second) == " module's name, and the name of the file, and the name of the file\n\n.. index::\n   single"
    )


async def test_text_tokens_and_detokenize_agree(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    responses = await collect(stub, request())
    detokenized = await stub.Detokenize(pb.DetokenizeRequest(ids=ids_of(responses)))
    assert detokenized.text == text_of(responses)


async def test_tokens_as_a_prompt_are_used_as_they_are(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    tokens = await stub.Tokenize(pb.TokenizeRequest(text=PROMPT, add_special=True))
    prompt = pb.Prompt(tokens=pb.TokenPrompt(ids=tokens.ids))
    message = pb.GenerateRequest(prompt=prompt, sampling=GREEDY, max_tokens=24)
    assert text_of(await collect(stub, message)) == text_of(await collect(stub, request(reuse_prefix=False)))


async def test_a_seed_fixes_the_text_whatever_runs_beside_it(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    sampled = request(sampling=sp.SamplingOptions(temperature=0.8, seed=42), reuse_prefix=False)
    # a companion all the time, since llama.cpp computes a single row another way than two and more
    options = sp.SamplingOptions(temperature=0, ignore_eos=True)
    companion = stub.Generate(request("Once", sampling=options, max_tokens=1500, slot_id=3))
    assert (await companion.read()).HasField("started")
    alone = await collect(stub, sampled)
    beside = [request(f"Number {i} is", max_tokens=60, reuse_prefix=False) for i in range(2)]
    *_, crowded = await asyncio.gather(*(collect(stub, message) for message in (*beside, sampled)))
    assert not companion.done()
    companion.cancel()
    assert ids_of(alone) == ids_of(crowded)
    assert alone[0].started.seed == 42


async def test_without_a_seed_each_request_has_its_own(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    message = request(sampling=sp.SamplingOptions(temperature=1.5))
    seeds = {(await collect(stub, message))[0].started.seed for _ in range(4)}
    assert len(seeds) == 4


async def test_the_text_ends_before_a_stop_string(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    whole = text_of(await collect(stub, request()))
    stop = whole[10:16]
    responses = await collect(stub, request(stop=["never in there", stop]))
    assert text_of(responses) == whole[: whole.index(stop)]
    assert responses[-1].finished.reason == pb.FINISH_REASON_STOP
    assert responses[-1].finished.stop == stop


async def test_log_probabilities_belong_to_the_tokens(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    responses = await collect(stub, request(logprobs=3))
    entries = [entry for response in responses for entry in response.delta.logprobs]
    assert [entry.token.token_id for entry in entries] == ids_of(responses)
    for entry in entries:
        assert len(entry.top) == 3
        assert entry.top[0].token_id == entry.token.token_id  # greedy took the best
        assert entry.top[0].logprob == entry.token.logprob <= 0
        assert [top.logprob for top in entry.top] == sorted((top.logprob for top in entry.top), reverse=True)
    assert b"".join(entry.token.piece for entry in entries).decode() == text_of(responses)


async def test_progress_is_reported_where_asked_for(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    responses = await collect(stub, request(PROMPT * 40, progress=True, max_tokens=1))
    progress = [response.progress for response in responses if response.HasField("progress")]
    assert len(progress) > 1
    assert progress[-1].processed_tokens == progress[-1].prompt_tokens == responses[0].started.prompt_tokens


async def test_a_time_limit_ends_the_text_regularly(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    options = sp.SamplingOptions(temperature=0, ignore_eos=True)
    message = request(sampling=options, max_tokens=2000, time_limit=Duration(nanos=50_000_000))
    responses = await collect(stub, message)
    assert responses[-1].finished.reason == pb.FINISH_REASON_TIME_LIMIT
    assert 0 < responses[-1].finished.usage.generated_tokens < 2000


async def test_a_grpc_deadline_frees_the_slot(server: Server, stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    options = sp.SamplingOptions(temperature=0, ignore_eos=True)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, request(sampling=options, max_tokens=2000), deadline=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await idle(server)


async def test_a_client_that_goes_away_frees_the_slot(server: Server, stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    options = sp.SamplingOptions(temperature=0, ignore_eos=True)
    call = stub.Generate(request(sampling=options, max_tokens=2000))
    async for response in call:
        if response.HasField("delta"):
            break
    call.cancel()
    await idle(server)


async def idle(server: Server) -> None:
    """Wait until no slot is busy."""
    async with asyncio.timeout(LIMIT):
        while (await server.backend.load_now()).busy_slots:
            pass


async def test_the_context_is_filled_to_its_last_token() -> None:
    options = sp.SamplingOptions(temperature=0, ignore_eos=True)
    config = settings(slots=1, slot_context=64)
    async with serving(config=config) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        responses = await collect(stub, request(sampling=options, max_tokens=500))
    assert responses[-1].finished.reason == pb.FINISH_REASON_CONTEXT_FULL
    assert len(ids_of(responses)) == 64 - 21 + 1


async def test_ignore_eos_and_logit_bias_forbid_tokens(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    first = ids_of(await collect(stub, request(max_tokens=1)))[0]
    options = sp.SamplingOptions(temperature=0, logit_bias={first: float("-inf")})
    assert ids_of(await collect(stub, request(max_tokens=1, sampling=options)))[0] != first
    options = sp.SamplingOptions(temperature=0, logit_bias={7: 1000.0})
    assert ids_of(await collect(stub, request(max_tokens=5, sampling=options))) == [7] * 5


@pytest.mark.parametrize(
    "options",
    [
        sp.SamplingOptions(top_k=5, top_p=0.9, min_p=0.02, typical_p=0.9, top_n_sigma=2.0),
        sp.SamplingOptions(xtc=sp.XtcOptions(probability=0.5, threshold=0.1)),
        sp.SamplingOptions(dry=sp.DryOptions(multiplier=0.8, window=-1, sequence_breakers=["\n", "—"])),
        sp.SamplingOptions(penalties=sp.PenaltyOptions(window=-1, repeat=1.3, frequency=0.2, presence=0.2)),
        sp.SamplingOptions(mirostat=sp.MirostatOptions(tau=4.0, eta=0.2)),
        sp.SamplingOptions(temperature=0, penalties=sp.PenaltyOptions(window=32, repeat=1.5)),
    ],
    ids=["truncation", "xtc", "dry", "penalties", "mirostat", "greedy-with-penalties"],
)
async def test_every_sampling_option_works_and_follows_the_seed(
    stub: pb_grpc.GenerationServiceAsyncStub, options: sp.SamplingOptions
) -> None:
    options.seed = 7
    texts = {text_of(await collect(stub, request(sampling=options, reuse_prefix=False))) for _ in range(2)}
    assert len(texts) == 1
    assert texts != {text_of(await collect(stub, request(reuse_prefix=False)))}


async def test_penalties_see_the_tail_of_the_prompt(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    prompt = await stub.Tokenize(pb.TokenizeRequest(text=PROMPT, add_special=True))
    options = sp.SamplingOptions(temperature=0, penalties=sp.PenaltyOptions(window=64, presence=100.0))
    drawn = ids_of(await collect(stub, request(sampling=options)))
    assert not set(drawn) & set(prompt.ids)
    assert len(set(drawn)) == len(drawn)


async def test_a_grammar_holds(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    grammar = sp.Grammar(gbnf='root ::= "yes" | "no" | [0-9]{3} "."')
    options = sp.SamplingOptions(seed=3, grammar=grammar)
    responses = await collect(stub, request(sampling=options))
    text = text_of(responses)
    assert text in ("yes", "no") or (text[:3].isdigit() and text[3:] == ".")
    assert responses[-1].finished.reason == pb.FINISH_REASON_END_OF_TEXT


async def test_a_finished_grammar_ends_the_text_even_without_eos(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    options = sp.SamplingOptions(temperature=0, ignore_eos=True, grammar=sp.Grammar(gbnf='root ::= "ab"'))
    responses = await collect(stub, request(sampling=options))
    assert text_of(responses) == "ab"
    assert responses[-1].finished.reason == pb.FINISH_REASON_END_OF_TEXT


async def test_a_json_schema_holds(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "tag": {"enum": ["red", "green"]}},
        "required": ["ok", "tag"],
        "additionalProperties": False,
    }
    options = sp.SamplingOptions(seed=5, grammar=sp.Grammar(json_schema=json.dumps(schema)))
    value = json.loads(text_of(await collect(stub, request(sampling=options, max_tokens=200))))
    assert set(value) == {"ok", "tag"}
    assert isinstance(value["ok"], bool)
    assert value["tag"] in ("red", "green")


async def test_sessions_keep_their_slots_and_slots_can_be_watched_and_erased(
    channel: grpc.aio.Channel, stub: pb_grpc.GenerationServiceAsyncStub
) -> None:
    slots = slot_pb2_grpc.SlotServiceStub(channel)
    first = await collect(stub, request(session="one"))
    await collect(stub, request("Another text entirely", session="two"))
    again = await collect(stub, request(PROMPT + text_of(first), session="one"))
    assert again[0].started.slot_id == first[0].started.slot_id
    assert again[0].started.reused_tokens == 44
    listed = (await slots.ListSlots(slot_pb2.ListSlotsRequest())).slots
    assert len(listed) == 4
    mine = next(slot for slot in listed if slot.session == "one")
    assert mine.state == slot_pb2.SLOT_STATE_IDLE
    assert mine.last_used.seconds > 0
    erased = await slots.EraseSlot(slot_pb2.EraseSlotRequest(id=mine.id))
    assert erased.erased_tokens == mine.cached_tokens > 0
    after = await slots.GetSlot(slot_pb2.GetSlotRequest(id=mine.id))
    assert after.slot.cached_tokens == 0
    assert not after.slot.HasField("session")


async def test_cache_keys_keep_tenants_apart(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    await collect(stub, request(slot_id=0, cache_key="tenant-a"))
    other = await collect(stub, request(slot_id=0, cache_key="tenant-b"))
    assert other[0].started.reused_tokens == 0


async def test_more_requests_than_slots_wait_their_turn(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    texts = await asyncio.gather(*(collect(stub, request(f"Chapter {i}:", max_tokens=12)) for i in range(20)))
    assert all(len(ids_of(responses)) == 12 for responses in texts)


async def test_a_grammar_that_becomes_too_ambiguous_ends_its_own_request_only(
    stub: pb_grpc.GenerationServiceAsyncStub,
) -> None:
    token = (await stub.Tokenize(pb.TokenizeRequest(text="a"))).ids[0]
    grammar = sp.Grammar(gbnf='root ::= "a" root "b" | "a" root "c" | "d"')  # twice as many ways with each "a"
    options = sp.SamplingOptions(temperature=0, grammar=grammar, logit_bias={token: 1000.0})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, request(sampling=options, max_tokens=500))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "ambiguous" in (caught.value.details() or "")
    assert len(ids_of(await collect(stub, request()))) == 24
