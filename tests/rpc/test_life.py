"""A server's life: loading, health, reflection, limits of the queue, stopping."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from service import backend
from service.engine.settings import SchedulingSettings
from service.errors import ConfigError
from service.server import Server
from slotwire.v1 import generation_pb2 as pb
from slotwire.v1 import generation_pb2_grpc as pb_grpc
from slotwire.v1 import sampling_pb2 as sp
from slotwire.v1 import system_pb2, system_pb2_grpc
from tests.conftest import LIMIT, TINY, serving, settings
from tests.rpc.test_bad_input import detail, refused

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def request(tokens: int = 4, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=pb.Prompt(text=pb.TextPrompt(text="Hello")),
        sampling=sp.SamplingOptions(temperature=0, ignore_eos=True),
        max_tokens=tokens,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds the loading of a model until it is set."""
    opened = threading.Event()
    load = backend.load_runner

    def slow(*arguments: object) -> object:
        assert opened.wait(LIMIT)
        return load(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "load_runner", slow)
    yield opened
    opened.set()


async def test_while_loading_health_waits_and_requests_are_told_to_retry(gate: threading.Event) -> None:
    async with Server(TINY, settings()) as server, grpc.aio.insecure_channel(server.address) as channel:
        loading = asyncio.create_task(server.load())
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="slotwire.v1.GenerationService")
        )
        assert (await watch.read()).status == NOT_SERVING
        error = await refused(pb_grpc.GenerationServiceStub(channel).Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert detail(error, error_details_pb2.ErrorInfo).reason == "LOADING"  # type: ignore[attr-defined]
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds > 0  # type: ignore[attr-defined]
        system = system_pb2_grpc.SystemServiceStub(channel)
        info = await system.GetServerInfo(system_pb2.GetServerInfoRequest())
        assert info.state == system_pb2.SERVER_STATE_LOADING
        gate.set()
        async with asyncio.timeout(LIMIT):
            await loading
            assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_health_covers_every_service_and_the_whole(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "slotwire.v1.GenerationService", "slotwire.v1.SlotService", "slotwire.v1.SystemService"):
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING


async def test_reflection_lists_and_describes_the_services(channel: grpc.aio.Channel) -> None:
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="slotwire.v1.GenerationService"),
    ]
    answers = [answer async for answer in reflection.ServerReflectionInfo(iter(ask))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"slotwire.v1.GenerationService", "slotwire.v1.SlotService", "slotwire.v1.SystemService"} <= names
    assert b"GenerateRequest" in answers[1].file_descriptor_response.file_descriptor_proto[0]


async def test_the_model_and_the_load_are_described(channel: grpc.aio.Channel) -> None:
    system = system_pb2_grpc.SystemServiceStub(channel)
    model = await system.GetModelInfo(system_pb2.GetModelInfoRequest())
    assert (model.name, model.architecture, model.vocabulary_size) == (TINY.name, "lfm2", 2048)
    assert (model.slots, model.context_tokens, model.slot_context_tokens) == (4, 2048, 2048)
    assert model.capabilities.hybrid
    assert not model.capabilities.trim
    assert model.sampling_defaults.top_k == 40
    assert not model.sampling_defaults.HasField("seed")
    stub = pb_grpc.GenerationServiceStub(channel)
    async for _ in stub.Generate(request(5)):
        pass
    load = await system.GetLoad(system_pb2.GetLoadRequest())
    assert (load.requests, load.generated_tokens, load.busy_slots) == (1, 5, 0)
    assert load.memory_bytes > 1_000_000
    assert load.busy_time.ToNanoseconds() > load.decode_time.ToNanoseconds() > 0


async def test_the_request_id_comes_back(channel: grpc.aio.Channel) -> None:
    stub = pb_grpc.GenerationServiceStub(channel)
    call = stub.Generate(request(1), metadata=(("x-request-id", "mine-1"),))
    first, *_ = [response async for response in call]
    trailing = dict(await call.trailing_metadata() or ())
    assert str(trailing["x-request-id"]).startswith("mine-1")
    assert first.started.request_id == trailing["x-request-id"]


async def test_a_full_queue_refuses_with_a_retry() -> None:
    config = settings(slots=1, scheduling=SchedulingSettings(queue=1))
    async with serving(config=config) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        running = stub.Generate(request(2000))
        assert (await running.read()).HasField("started")
        waiting = stub.Generate(request(2000))
        read = asyncio.create_task(waiting.read())
        async with asyncio.timeout(LIMIT):
            while not (await server.backend.load_now()).queued_requests:
                pass
        error = await refused(stub.Generate(request()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "QUEUE_FULL"  # type: ignore[attr-defined]
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds > 0  # type: ignore[attr-defined]
        running.cancel()
        assert (await read).HasField("started")
        waiting.cancel()


async def test_erasing_a_busy_slot_is_refused(channel: grpc.aio.Channel) -> None:
    from slotwire.v1 import slot_pb2, slot_pb2_grpc

    running = pb_grpc.GenerationServiceStub(channel).Generate(request(2000, slot_id=2))
    await running.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await slot_pb2_grpc.SlotServiceStub(channel).EraseSlot(slot_pb2.EraseSlotRequest(id=2))
    running.cancel()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    violation = detail(caught.value, error_details_pb2.PreconditionFailure).violations[0]  # type: ignore[attr-defined]
    assert violation.type == "SLOT_BUSY"


async def test_a_client_that_never_reads_is_cut_off_and_its_neighbour_is_not() -> None:
    config = settings(context=4096, scheduling=SchedulingSettings(outbox_seconds=0.2))
    small_window = (("grpc.http2.bdp_probe", 0),)  # or the transport would take megabytes for an absent reader
    async with (
        serving(config=config) as server,
        grpc.aio.insecure_channel(server.address, options=small_window) as channel,
        grpc.aio.insecure_channel(server.address) as neighbour,
    ):
        stalled = pb_grpc.GenerationServiceStub(channel).Generate(request(2000, logprobs=64))
        await stalled.initial_metadata()
        stub = pb_grpc.GenerationServiceStub(neighbour)
        responses = [response async for response in stub.Generate(request(1000))]
        assert responses[-1].finished.usage.generated_tokens == 1000
        async with asyncio.timeout(LIMIT):
            while (await server.backend.load_now()).busy_slots:
                pass
        error = await refused(stalled)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "SLOW_READER"  # type: ignore[attr-defined]


async def test_stopping_lets_running_requests_end_and_refuses_new_ones() -> None:
    server = Server(TINY, settings())
    await server.start()
    await server.load()
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        running = stub.Generate(request(300)).__aiter__()
        assert (await anext(running)).HasField("started")
        stopping = asyncio.create_task(server.stop(LIMIT))
        tokens = [token async for response in running for token in response.delta.token_ids]
        assert len(tokens) == 300
        async with asyncio.timeout(LIMIT):
            await stopping
        error = await refused(stub.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_port_that_is_taken_is_an_error(server: Server) -> None:
    from dataclasses import replace

    config = settings()
    taken = replace(config, server=replace(config.server, listen=server.address))
    with pytest.raises(ConfigError, match="listen"):
        async with Server(TINY, taken):
            pass
