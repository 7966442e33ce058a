"""The processes under test: a Slotwire server, and the bare loop it is compared with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil

from slotwire_client import Client

START_SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def server(model: Path, *options: str) -> AsyncIterator[tuple[Client, psutil.Process]]:
    """A server process of its own, ready, and a client of it."""
    address = f"127.0.0.1:{free_port()}"
    arguments = ("-m", "service.cli", "serve", "--model", str(model), "--listen", address, *options)
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with Client(address) as client:
            await client.wait_ready(START_SECONDS)
            yield client, psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


class Bare:
    """The bare loop in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Tokens a second of greedy generation after these prompts."""
        seconds = await self._job(kind="generate", prompts=[list(prompt) for prompt in prompts], tokens=tokens)
        return len(prompts) * tokens / seconds

    async def prefill(self, prompt: Sequence[int]) -> float:
        """Prompt tokens a second."""
        return len(prompt) / await self._job(kind="prefill", prompts=[list(prompt)])

    async def _job(self, **job: object) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        await self._process.stdin.drain()
        answer = json.loads(await self._process.stdout.readline())
        return float(answer["seconds"])


@contextlib.asynccontextmanager
async def bare(model: Path, *options: str) -> AsyncIterator[Bare]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.bare", "--model", str(model), *options,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24,
    )  # fmt: skip
    try:
        yield Bare(process)
    finally:
        process.terminate()
        await process.wait()
