"""Many clients, some of which go away: every stream ends with the right status, and nothing is left behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import sys
from collections import Counter

import grpc
import psutil

from service.engine.settings import SchedulingSettings
from service.server import Server
from slotwire.v1 import generation_pb2 as pb
from slotwire.v1 import generation_pb2_grpc as pb_grpc
from slotwire.v1 import sampling_pb2 as sp
from tests.conftest import LIMIT, serving, settings

REQUESTS, CONCURRENT = 1000, 64


async def one(stub: pb_grpc.GenerationServiceAsyncStub, rng: random.Random, kind: str) -> str:
    """Run one request of a kind; returns how it ended."""
    tokens = rng.randrange(4, 24)
    message = pb.GenerateRequest(
        prompt=pb.Prompt(tokens=pb.TokenPrompt(ids=[rng.randrange(2, 2000) for _ in range(rng.randrange(1, 60))])),
        sampling=sp.SamplingOptions(temperature=rng.choice([0.0, 0.9]), ignore_eos=True),
        max_tokens=1900 if kind == "deadline" else tokens,
    )
    call = stub.Generate(message, timeout=0.01 if kind == "deadline" else 120)
    read = 0
    leave_after = rng.randrange(0, 6)
    try:
        async for response in call:
            read += 1
            if kind == "cancel" and read > leave_after:
                call.cancel()
            if response.HasField("finished"):
                assert response.finished.usage.generated_tokens == message.max_tokens
    except asyncio.CancelledError:
        return "cancelled"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return (await call.code()).name


async def flood(server: Server, requests: int, seed: int) -> Counter[tuple[str, str]]:
    rng = random.Random(seed)
    kinds = ["cancel" if i % 3 == 0 else "deadline" if i % 10 == 1 else "whole" for i in range(requests)]
    rng.shuffle(kinds)
    outcomes: Counter[tuple[str, str]] = Counter()
    places = asyncio.Semaphore(CONCURRENT)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)

        async def run(kind: str) -> None:
            async with places:
                outcomes[kind, await one(stub, rng, kind)] += 1

        await asyncio.gather(*map(run, kinds))
    async with asyncio.timeout(LIMIT):
        while (await server.backend.load_now()).busy_slots:
            pass
    return outcomes


def memory() -> int:
    """Resident bytes of this process, without what the allocators merely keep."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


async def test_a_thousand_requests_leave_nothing_behind() -> None:
    config = settings(slots=8, scheduling=SchedulingSettings(queue=CONCURRENT))
    async with serving(config=config) as server:
        await flood(server, REQUESTS, seed=1)  # warm-up: allocators and channels reach their size
        before = memory()
        outcomes = await flood(server, REQUESTS, seed=2)
        assert memory() <= 1.02 * before
        assert sum(outcomes.values()) == REQUESTS
        assert {status for kind, status in outcomes if kind == "whole"} == {"OK"}
        assert {status for kind, status in outcomes if kind == "deadline"} == {"DEADLINE_EXCEEDED"}
        assert {status for kind, status in outcomes if kind == "cancel"} <= {"cancelled", "CANCELLED", "OK"}
        load = await server.backend.load_now()
        assert (load.busy_slots, load.queued_requests) == (0, 0)
        assert server.backend.open_requests == 0
