"""Saving and restoring slots: goodput against raw bytes through grpc.aio, time to the first token, a neighbour's pause.

python -m bench state [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import psutil

from bench.engine import OPENINGS
from bench.models import cache, smollm2
from bench.processes import free_port, server
from slotwire.v1 import slot_pb2 as pb
from slotwire.v1 import slot_pb2_grpc as pb_grpc
from slotwire_client import Client
from tests.random_models import wide

CHUNKS = (64 << 10, 256 << 10, 1 << 20)
STATE_TOKENS = 200  # of 1 MiB each
LENGTHS = (1000, 4000)


@dataclass(slots=True)
class Figures:
    """Measurements by name; of each round one."""

    runs: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        self.runs.setdefault(name, []).append(value)

    def table(self) -> str:
        rows = ["| what | median | each round |", "|---|---|---|"]
        for name, values in self.runs.items():
            each = ", ".join(f"{value:.3g}" for value in values)
            rows.append(f"| {name} | {statistics.median(values):.3g} | {each} |")
        return "\n".join(rows)

    def as_dict(self) -> dict[str, object]:
        return {"medians": {name: statistics.median(values) for name, values in self.runs.items()}, "runs": self.runs}


@contextlib.asynccontextmanager
async def raw() -> AsyncIterator[grpc.aio.Channel]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.raw", "--port", str(port), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]
        ) as channel:
            yield channel
    finally:
        process.terminate()
        await process.wait()


async def raw_down(channel: grpc.aio.Channel, size: int, chunk: int) -> float:
    """Bytes a second."""
    began, total = time.perf_counter(), 0
    async for data in channel.unary_stream("/bench.Raw/Down")(f"{size // chunk} {chunk}".encode()):
        total += len(data)
    return total / (time.perf_counter() - began)


async def raw_up(channel: grpc.aio.Channel, size: int, chunk: int) -> float:
    async def messages() -> AsyncIterator[bytes]:
        data = bytes(chunk)
        for _ in range(size // chunk):
            yield data

    began = time.perf_counter()
    total = int(await channel.stream_unary("/bench.Raw/Up")(messages()))
    return total / (time.perf_counter() - began)


async def save(stub: pb_grpc.SlotServiceAsyncStub, chunk: int) -> float:
    """Bytes a second."""
    began, total = time.perf_counter(), 0
    async for message in stub.SaveSlot(pb.SaveSlotRequest(slot_id=0, chunk_bytes=chunk)):
        total += len(message.chunk.data)
    return total / (time.perf_counter() - began)


async def restore(stub: pb_grpc.SlotServiceAsyncStub, saved: list[pb.SaveSlotResponse]) -> float:
    size = saved[0].header.size_bytes

    async def messages() -> AsyncIterator[pb.RestoreSlotRequest]:
        yield pb.RestoreSlotRequest(header=pb.RestoreSlotHeader(size_bytes=size, slot_id=1))
        for message in saved[1:-1]:
            yield pb.RestoreSlotRequest(chunk=message.chunk)
        yield pb.RestoreSlotRequest(trailer=saved[-1].trailer)

    began = time.perf_counter()
    await stub.RestoreSlot(messages())
    return size / (time.perf_counter() - began)


async def goodput(figures: Figures, rounds: int) -> None:
    """With a state of 200 MB, in a model that computes next to nothing."""
    model = cache() / "wide.gguf"
    if not model.exists():
        wide(model)
    options = ("--slots", "2", "--context", "512", "--log-level", "warning")
    async with server(model, *options) as (client, process), raw() as channel:
        prompt = [300 + index % 900 for index in range(STATE_TOKENS)]
        async with client.generate(prompt, max_tokens=1, temperature=0, slot_id=0) as generation:
            await generation.complete()
        await client.save_slot(0, io.BytesIO())
        limit = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(client.target, options=limit) as direct:
            stub: pb_grpc.SlotServiceAsyncStub = pb_grpc.SlotServiceStub(direct)  # type: ignore[assignment]
            for _ in range(rounds):
                for chunk in CHUNKS:
                    await _compare(figures, stub, channel, chunk, process)


async def _compare(
    figures: Figures,
    stub: pb_grpc.SlotServiceAsyncStub,
    channel: grpc.aio.Channel,
    chunk: int,
    process: psutil.Process,
) -> None:
    name, before = f"{chunk >> 10} KiB chunks", process.memory_info().rss
    peak = asyncio.create_task(_peak(process))
    down = await save(stub, chunk)
    saved = [message async for message in stub.SaveSlot(pb.SaveSlotRequest(slot_id=0, chunk_bytes=chunk))]
    size = saved[0].header.size_bytes
    base = await raw_down(channel, size, chunk)
    up = await restore(stub, saved)
    raw_base = await raw_up(channel, size, chunk)
    peak.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await peak
    figures.note(f"save over raw, {name}", down / base)
    figures.note(f"restore over raw, {name}", up / raw_base)
    figures.note(f"save, {name}, GB/s", down / 1e9)
    figures.note(f"restore, {name}, GB/s", up / 1e9)
    figures.note(f"peak extra memory over state size, {name}", (_PEAKS.pop() - before) / size)


_PEAKS: list[int] = []


async def _peak(process: psutil.Process) -> None:
    """Looks at the server's memory until it is cancelled, and leaves the most it saw in `_PEAKS`."""
    most = 0
    try:
        while True:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.005)
    finally:
        _PEAKS.append(most)


async def first_token(figures: Figures, rounds: int) -> None:
    """A restored conversation against one that is computed again, on SmolLM2."""
    options = ("--slots", "2", "--context", "8192", "--slot-context", "8000")
    async with server(smollm2("Q4_0"), *options) as (client, _):
        for length in LENGTHS:
            text = " ".join(OPENINGS) * (length // 60)
            prompt = (await client.tokenize(text))[:length]
            for _ in range(rounds):
                await client.erase_slot(0)
                recomputed = await _time_to_token(client, prompt)
                image = io.BytesIO()
                await client.save_slot(0, image)
                await client.erase_slot(0)
                began = time.perf_counter()
                await client.restore_slot(image.getvalue(), slot_id=0)
                restored = time.perf_counter() - began + await _time_to_token(client, [*prompt, 300])
                figures.note(f"{length} tokens, first token after restoring, s", restored)
                figures.note(f"{length} tokens, computing over restoring", recomputed / restored)


async def _time_to_token(client: Client, prompt: list[int]) -> float:
    began = time.perf_counter()
    async with client.generate(prompt, max_tokens=1, temperature=0, slot_id=0) as generation:
        await generation.complete()
    return time.perf_counter() - began


async def pause(figures: Figures, rounds: int) -> None:
    """The longest time between two tokens of a neighbour while 200 MB are saved, and the usual one."""
    model = cache() / "wide.gguf"
    async with server(model, "--slots", "2", "--context", "2048") as (client, _):
        prompt = [300 + index % 900 for index in range(STATE_TOKENS)]
        async with client.generate(prompt, max_tokens=1, temperature=0, slot_id=0) as generation:
            await generation.complete()
        for _ in range(rounds):
            gaps = await _gaps(client, client.save_slot(0, io.BytesIO()))
            figures.note("neighbour: longest pause during a save of 200 MB, ms", 1e3 * max(gaps))
            figures.note("neighbour: median between tokens, ms", 1e3 * statistics.median(gaps))


async def _gaps(client: Client, work: object) -> list[float]:
    arrivals: list[float] = []
    async with client.generate([301, 302], max_tokens=200, temperature=0, ignore_eos=True, slot_id=1) as generation:
        task: asyncio.Task[object] | None = None
        async for _ in generation.events():
            arrivals.append(time.perf_counter())
            if len(arrivals) == 20:
                task = asyncio.ensure_future(work)  # type: ignore[arg-type]
            if task is not None and task.done():
                break
        if task is not None:
            await task
    return [after - before for before, after in itertools.pairwise(arrivals[5:])]


async def measure(rounds: int) -> Figures:
    figures = Figures()
    await goodput(figures, rounds)
    await first_token(figures, rounds)
    await pause(figures, rounds)
    return figures
