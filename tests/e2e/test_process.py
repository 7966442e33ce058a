"""A server process of its own: how it starts, says so, and stops."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from slotwire.v1 import generation_pb2 as pb
from slotwire.v1 import generation_pb2_grpc as pb_grpc
from slotwire.v1 import sampling_pb2 as sp
from slotwire_client import Client
from tests.conftest import LIMIT, TINY


@contextlib.asynccontextmanager
async def process(*options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`slotwire serve` with the tiny model, killed at the end if it still runs."""
    arguments = ("-m", "service.cli", "serve", "--model", str(TINY), "--threads", "1", "--context", "4096", *options)
    running = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=asyncio.subprocess.PIPE)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.communicate()


async def line(running: asyncio.subprocess.Process, words: str) -> str:
    """The next line of its standard error that has these words."""
    assert running.stderr is not None
    async with asyncio.timeout(LIMIT):
        while text := (await running.stderr.readline()).decode():
            if words in text:
                return text
    raise AssertionError(f"it ended without saying {words!r}")


def request(tokens: int) -> pb.GenerateRequest:
    options = sp.SamplingOptions(temperature=0, ignore_eos=True)
    prompt = pb.Prompt(text=pb.TextPrompt(text="Hello"))
    return pb.GenerateRequest(prompt=prompt, sampling=options, max_tokens=tokens)


async def test_it_says_when_and_where_it_is_ready(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    async with process("--listen", "127.0.0.1:0", "--ready-file", str(ready)) as running:
        text = await line(running, "ready")
        assert TINY.name in text
        assert "4 slots" in text
        assert "4,096 tokens" in text
        assert "MiB of memory" in text
        assert ready.read_text() in text
        async with Client(ready.read_text()) as client:
            await client.wait_ready(LIMIT)
            assert (await client.model_info()).name == TINY.name


async def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with process("--listen", address) as running:
        await line(running, "ready")
        async with Client(address) as client:
            assert (await client.generate("Hello", max_tokens=3, temperature=0).complete()).text


async def test_a_signal_lets_running_requests_end(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with process("--listen", address) as running, grpc.aio.insecure_channel(address) as channel:
        await line(running, "ready")
        stream = pb_grpc.GenerationServiceStub(channel).Generate(request(1000)).__aiter__()
        assert (await anext(stream)).HasField("started")
        running.send_signal(signal.SIGTERM)
        responses = [response async for response in stream]
        assert responses[-1].finished.usage.generated_tokens == 1000
        async with asyncio.timeout(LIMIT):
            assert await running.wait() == 0


async def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with process("--listen", address) as running, grpc.aio.insecure_channel(address) as channel:
        await line(running, "ready")
        stream = pb_grpc.GenerationServiceStub(channel).Generate(request(4000)).__aiter__()
        assert (await anext(stream)).HasField("started")
        running.send_signal(signal.SIGINT)
        await line(running, "stopping")
        running.send_signal(signal.SIGTERM)  # of whichever kind
        async with asyncio.timeout(LIMIT):
            assert await running.wait() == -signal.SIGTERM
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [response async for response in stream]


async def test_a_model_that_cannot_be_loaded_ends_it_with_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(TINY.read_bytes()[:300_000])
    arguments = ("-m", "service.cli", "serve", "--model", str(broken), "--listen", "127.0.0.1:0")
    running = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(LIMIT):
        _, errors = await running.communicate()
    assert running.returncode == 2
    last = errors.decode().splitlines()[-1]
    assert last.startswith(f"slotwire: model: cannot load {broken}: ")
    assert "Traceback" not in errors.decode()
