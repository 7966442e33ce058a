"""What a caller can get wrong: each has its own clear error with google.rpc details, and the service goes on."""

from __future__ import annotations

import math
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from service.engine.settings import Grammars, SchedulingSettings
from service.errors import ConfigError
from service.server import Server
from slotwire.v1 import generation_pb2 as pb
from slotwire.v1 import generation_pb2_grpc as pb_grpc
from slotwire.v1 import sampling_pb2 as sp
from slotwire.v1 import slot_pb2, slot_pb2_grpc, system_pb2, system_pb2_grpc
from tests.conftest import LIMIT, TINY, serving, settings

VOCABULARY = 2048
ROOM = 2047  # tokens of a prompt in a slot of 2,048


def text(value: str = "Hello", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=pb.Prompt(text=pb.TextPrompt(text=value)), **({"max_tokens": 2} | fields)  # type: ignore[arg-type]
    )  # fmt: skip


def sampling(**fields: object) -> pb.GenerateRequest:
    return text(sampling=sp.SamplingOptions(**fields))  # type: ignore[arg-type]


def tokens(*ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=pb.Prompt(tokens=pb.TokenPrompt(ids=ids)))


def gbnf(value: str) -> pb.GenerateRequest:
    return sampling(grammar=sp.Grammar(gbnf=value))


def schema(value: str) -> pb.GenerateRequest:
    return sampling(grammar=sp.Grammar(json_schema=value))


both = pb.GenerateRequest(prompt=pb.Prompt(text=pb.TextPrompt(text="a"), tokens=pb.TokenPrompt(ids=[1])))

BAD = {
    "no prompt": (pb.GenerateRequest(), "prompt", "exactly one"),
    "no prompt kind": (pb.GenerateRequest(prompt=pb.Prompt()), "prompt", "exactly one"),
    "both prompt kinds": (both, "prompt", "exactly one"),
    "empty text": (text(""), "prompt.text.text", "at least 1"),
    "no tokens": (tokens(), "prompt.tokens.ids", "at least 1"),
    "token beyond the vocabulary": (tokens(1, VOCABULARY), "prompt.tokens.ids[1]", f"[0, {VOCABULARY})"),
    "negative token": (tokens(-1), "prompt.tokens.ids[0]", f"[0, {VOCABULARY})"),
    "prompt too long": (tokens(*[5] * 3000), "prompt", f"3000 tokens; the slot's context has room for {ROOM}"),
    "text that cannot fit": (text("word " * 100_000), "prompt", f"room for {ROOM}"),
    "no messages": (pb.GenerateRequest(prompt=pb.Prompt(chat=pb.ChatPrompt())), "prompt.chat.messages", "1 to"),
    "empty stop string": (text(stop=["ok", ""]), "stop[1]", "1 to 1024"),
    "long stop string": (text(stop=["x" * 1025]), "stop[0]", "1 to 1024"),
    "10,000 stop strings": (text(stop=["x"] * 10_000), "stop", "10000 strings; at most 64"),
    "time limit of zero": (text(time_limit=Duration()), "time_limit", "above 0"),
    "negative time limit": (text(time_limit=Duration(seconds=-1)), "time_limit", "above 0"),
    "too many logprobs": (text(logprobs=65), "logprobs", "[0, 64]"),
    "empty session": (text(session=""), "session", "1 to 256"),
    "long cache key": (text(cache_key="k" * 257), "cache_key", "1 to 256"),
    "negative temperature": (sampling(temperature=-0.1), "sampling.temperature", "[0, 100]"),
    "temperature no number": (sampling(temperature=math.nan), "sampling.temperature", "nan"),
    "infinite temperature": (sampling(temperature=math.inf), "sampling.temperature", "[0, 100]"),
    "negative top_k": (sampling(top_k=-1), "sampling.top_k", "[0, "),
    "top_p of zero": (sampling(top_p=0.0), "sampling.top_p", "(0, 1]"),
    "top_p above one": (sampling(top_p=1.5), "sampling.top_p", "(0, 1]"),
    "negative min_p": (sampling(min_p=-1.0), "sampling.min_p", "[0, 1]"),
    "typical_p no number": (sampling(typical_p=math.nan), "sampling.typical_p", "(0, 1]"),
    "negative top_n_sigma": (sampling(top_n_sigma=-2.0), "sampling.top_n_sigma", "[0, 100]"),
    "xtc": (sampling(xtc=sp.XtcOptions(probability=2.0)), "sampling.xtc.probability", "[0, 1]"),
    "dry": (sampling(dry=sp.DryOptions(base=0.5)), "sampling.dry.base", "[1, 100]"),
    "dry breaker": (sampling(dry=sp.DryOptions(sequence_breakers=["a\0"])), "sampling.dry.sequence_breakers[0]", "NUL"),
    "penalty window": (sampling(penalties=sp.PenaltyOptions(window=-2)), "sampling.penalties.window", "[-1, "),
    "repeat penalty": (sampling(penalties=sp.PenaltyOptions(repeat=0.0)), "sampling.penalties.repeat", "(0, 100]"),
    "mirostat": (sampling(mirostat=sp.MirostatOptions(tau=-1.0)), "sampling.mirostat.tau", "(0, 100]"),
    "bias no number": (sampling(logit_bias={3: math.nan}), "sampling.logit_bias[3]", "nan"),
    "bias for no token": (sampling(logit_bias={VOCABULARY: 1.0}), "sampling.logit_bias[0]", f"[0, {VOCABULARY})"),
    "seed that means random": (sampling(seed=2**32 - 1), "sampling.seed", "[0, "),
    "both grammars": (sampling(grammar=sp.Grammar(gbnf="root ::= a", json_schema="{}")), "sampling.grammar", "one of"),
    "grammar syntax": (gbnf('root ::= "a"\nx ::= ]'), "sampling.grammar.gbnf", "line 2"),
    "grammar without root": (gbnf('x ::= "a"'), "sampling.grammar.gbnf", "root"),
    "grammar with an undefined rule": (gbnf("root ::= missing"), "sampling.grammar.gbnf", "missing"),
    "left recursion": (gbnf('root ::= root "a"'), "sampling.grammar.gbnf", "recursi"),
    "deep grammar": (gbnf("root ::= " + "(" * 50_000 + ")" * 50_000), "sampling.grammar.gbnf", "nested deeper than"),
    "schema no JSON": (schema('{"type": '), "sampling.grammar.json_schema", "line 1"),
    "schema of no type": (schema('{"type": "thing"}'), "sampling.grammar.json_schema", "type"),
    "remote reference": (schema('{"$ref": "https://example.com/x"}'), "sampling.grammar.json_schema", "ref"),
}  # fmt: skip


def details(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    found = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    assert isinstance(found, bytes), "no google.rpc details"
    return status_pb2.Status.FromString(found)


def detail(error: grpc.aio.AioRpcError, kind: type) -> object:
    for packed in details(error).details:
        value = kind()
        if packed.Unpack(value):
            return value
    raise AssertionError(f"no {kind.__name__} in the details")


async def refused(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def works(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    responses = [response async for response in stub.Generate(text(), timeout=LIMIT)]
    assert responses[-1].HasField("finished")


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> pb_grpc.GenerationServiceAsyncStub:
    return pb_grpc.GenerationServiceStub(channel)


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_field_is_named_with_its_limit(stub: pb_grpc.GenerationServiceAsyncStub, name: str) -> None:
    message, field, words = BAD[name]
    error = await refused(stub.Generate(message, timeout=LIMIT))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    violation = detail(error, error_details_pb2.BadRequest).field_violations[0]  # type: ignore[attr-defined]
    assert violation.field == field
    assert words in violation.description
    assert field in (error.details() or "")
    info = detail(error, error_details_pb2.ErrorInfo)
    assert info.domain == "slotwire"  # type: ignore[attr-defined]
    assert info.reason  # type: ignore[attr-defined]
    await works(stub)


async def test_all_bad_fields_are_named_at_once(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    message = text(stop=[""], logprobs=100, sampling=sp.SamplingOptions(temperature=-1))
    error = await refused(stub.Generate(message))
    violations = detail(error, error_details_pb2.BadRequest).field_violations  # type: ignore[attr-defined]
    assert {violation.field for violation in violations} == {"stop[0]", "logprobs", "sampling.temperature"}


async def test_a_grammar_error_has_its_place(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    error = await refused(stub.Generate(gbnf('root ::= "a"\nx ::= ]')))
    metadata = detail(error, error_details_pb2.ErrorInfo).metadata  # type: ignore[attr-defined]
    assert (metadata["line"], metadata["column"]) == ("2", "7")


async def test_a_prompt_that_is_too_long_tells_the_numbers(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    error = await refused(stub.Generate(tokens(*[5] * 3000)))
    info = detail(error, error_details_pb2.ErrorInfo)
    assert info.reason == "PROMPT_TOO_LONG"  # type: ignore[attr-defined]
    assert (info.metadata["tokens"], info.metadata["limit"]) == ("3000", str(ROOM))  # type: ignore[attr-defined]


async def test_an_unknown_slot_is_not_found(
    channel: grpc.aio.Channel, stub: pb_grpc.GenerationServiceAsyncStub
) -> None:
    error = await refused(stub.Generate(text(slot_id=4)))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    slots = slot_pb2_grpc.SlotServiceStub(channel)
    for call in (slots.GetSlot(slot_pb2.GetSlotRequest(id=4)), slots.EraseSlot(slot_pb2.EraseSlotRequest(id=99))):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert detail(caught.value, error_details_pb2.ErrorInfo).reason == "NO_SUCH_SLOT"  # type: ignore[attr-defined]


async def test_chat_without_a_template_is_a_failed_precondition(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hello")])
    error = await refused(stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(chat=chat))))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert detail(error, error_details_pb2.ErrorInfo).reason == "NO_CHAT_TEMPLATE"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("allowed", "refusals"), [("schemas", 1), ("none", 2)])
async def test_an_operator_can_refuse_grammars(allowed: Grammars, refusals: int) -> None:
    config = settings(scheduling=SchedulingSettings(grammars=allowed))
    async with serving(config=config) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        for message in (gbnf("root ::= [a-z]"), schema('{"type": "boolean"}'))[:refusals]:
            error = await refused(stub.Generate(message))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert detail(error, error_details_pb2.ErrorInfo).reason == "GRAMMARS_OFF"  # type: ignore[attr-defined]
        await works(stub)


async def test_tokenize_and_detokenize_refuse_what_they_cannot_use(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    for call, field in (
        (stub.Tokenize(pb.TokenizeRequest()), "text"),
        (stub.Tokenize(pb.TokenizeRequest(text="a", text_bytes=b"a")), "text"),
        (stub.Tokenize(pb.TokenizeRequest(text_bytes=b"ab\xff")), "text_bytes"),
        (stub.Detokenize(pb.DetokenizeRequest(ids=[1, VOCABULARY])), "ids[1]"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        violation = detail(caught.value, error_details_pb2.BadRequest).field_violations[0]  # type: ignore[attr-defined]
        assert violation.field == field


async def test_invalid_utf8_names_its_place(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(pb.TokenizeRequest(text_bytes="é".encode() + b"\xff"))
    assert "byte 2" in (caught.value.details() or "")
    assert detail(caught.value, error_details_pb2.ErrorInfo).metadata["offset"] == "2"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff", b"\x0a\x05\x0a\x03\x0a\x01\xff"], ids=["garbage", "bad UTF-8 in a string"]
)
async def test_bytes_that_are_no_message_are_an_invalid_argument(channel: grpc.aio.Channel, data: bytes) -> None:
    call = channel.unary_stream(
        "/slotwire.v1.GenerationService/Generate", lambda raw: raw, pb.GenerateResponse.FromString
    )
    error = await refused(call(data))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error, error_details_pb2.ErrorInfo).reason == "MALFORMED_MESSAGE"  # type: ignore[attr-defined]


async def test_a_message_over_the_limit_names_the_limit() -> None:
    async with Server(TINY, settings(max_message_bytes=100_000)) as server:
        await server.load()
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            error = await refused(stub.Generate(text("x" * 150_000)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            info = detail(error, error_details_pb2.ErrorInfo)
            assert (info.reason, info.metadata["limit"]) == ("MESSAGE_TOO_LARGE", "100000")  # type: ignore[attr-defined]
            far_over = await refused(stub.Generate(text("x" * 1_000_000)))  # gRPC's own refusal
            assert far_over.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await works(stub)


def truncated(folder: Path) -> Path:
    path = folder / "truncated.gguf"
    path.write_bytes(TINY.read_bytes()[:500_000])
    return path


def garbage(folder: Path) -> Path:
    path = folder / "garbage.gguf"
    path.write_bytes(b"PK\x03\x04 something else entirely")
    return path


def damaged(folder: Path) -> Path:
    path = folder / "damaged.gguf"
    data = bytearray(TINY.read_bytes())
    data[8:24] = b"\xff" * 16  # the counts of tensors and metadata
    path.write_bytes(data)
    return path


def missing(folder: Path) -> Path:
    return folder / "missing.gguf"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (missing, "MODEL_MISSING"),
        (garbage, "MODEL_NO_GGUF"),
        (truncated, "MODEL_UNUSABLE"),
        (damaged, "MODEL_UNUSABLE"),
    ],
)
async def test_a_model_that_cannot_be_loaded_is_explained_to_all(make, reason: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = make(tmp_path)
    async with Server(path, settings()) as server:
        with pytest.raises(ConfigError) as failure:
            await server.load()
        assert failure.value.reason == reason
        assert str(path) in failure.value.message
        async with grpc.aio.insecure_channel(server.address) as channel:
            error = await refused(pb_grpc.GenerationServiceStub(channel).Generate(text()))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert detail(error, error_details_pb2.ErrorInfo).reason == reason  # type: ignore[attr-defined]
            system = system_pb2_grpc.SystemServiceStub(channel)
            info = await system.GetServerInfo(system_pb2.GetServerInfoRequest())
            assert info.state == system_pb2.SERVER_STATE_FAILED
