"""The engine against a bare `llama_decode` loop: throughput, pace while a prompt arrives, prefill, processor time.

    python -m bench engine [--rounds 3] [--json FILE]

Both sides run SmolLM2 as Q4_0, greedy, with the same threads, slots and context, in turn, in the same run. The client
is a process of its own on the same cores.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import psutil

from bench.processes import bare, server
from slotwire.v1 import generation_pb2 as pb
from slotwire.v1 import generation_pb2_grpc as pb_grpc
from slotwire.v1 import sampling_pb2 as sp
from slotwire_client import Load

STREAMS = (1, 4, 8)
TOKENS = 128
LONG_PROMPT = 2000
UNDER_WAY = 100  # messages of each stream, before the long prompt arrives
SLOTS, CONTEXT = 8, 8192

OPENINGS = (
    "The history of the lighthouse begins with a storm that",
    "In the kitchen of a small restaurant, the cook explained how",
    "The committee published its report on the bridge, and",
    "Snow had been falling since the morning, so the travellers",
    "A good compiler does more than translate a program; it",
    "My grandmother kept bees behind the house, and every summer",
    "The orchestra tuned its instruments while the conductor",
    "Far from the coast, the desert hides rivers that",
)


class Report:
    """All measurements by name: tokens a second, or seconds."""

    def __init__(self) -> None:
        self.runs: dict[str, list[float]] = {}

    def note(self, name: str, value: float) -> None:
        self.runs.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.runs[name])

    def ratio(self, over: str, under: str) -> float:
        """Median of the ratios of measurements that were made one after the other."""
        return statistics.median(a / b for a, b in zip(self.runs[over], self.runs[under], strict=True))

    def as_dict(self) -> dict[str, object]:
        ratios = {f"throughput at {n}": self.ratio(f"service {n}", f"bare {n}") for n in STREAMS}
        ratios["pace p99 during a prompt"] = self.ratio("during", "before")
        ratios["prefill"] = self.ratio("prefill", "bare prefill")
        return {"ratios": ratios, "runs": self.runs}


class Stream:
    """One generation: when its messages came, and how many tokens each had."""

    def __init__(self, stub: pb_grpc.GenerationServiceAsyncStub, prompt: Sequence[int], tokens: int) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self.under_way = asyncio.Event()
        """Set once `UNDER_WAY` messages came."""
        self._request = pb.GenerateRequest(
            prompt=pb.Prompt(tokens=pb.TokenPrompt(ids=prompt)), max_tokens=tokens, reuse_prefix=False,
            sampling=sp.SamplingOptions(temperature=0, ignore_eos=True),
        )  # fmt: skip
        self._stub = stub

    async def run(self) -> None:
        async for response in self._stub.Generate(self._request):
            if response.HasField("delta"):
                self.arrivals.append((time.perf_counter(), len(response.delta.token_ids)))
                if len(self.arrivals) == UNDER_WAY:
                    self.under_way.set()

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(time, seconds since the message before) of each message but the first."""
        times = [at for at, _ in self.arrivals]
        return [(later, later - earlier) for earlier, later in itertools.pairwise(times)]


async def throughput(stub: pb_grpc.GenerationServiceAsyncStub, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens a second while all streams generate."""
    streams = [Stream(stub, prompt, TOKENS) for prompt in prompts]
    await asyncio.gather(*(stream.run() for stream in streams))
    began = max(stream.arrivals[0][0] for stream in streams)
    ended = min(stream.arrivals[-1][0] for stream in streams)
    tokens = sum(count for stream in streams for at, count in stream.arrivals if began < at <= ended)
    return tokens / (ended - began)


async def pace(
    stub: pb_grpc.GenerationServiceAsyncStub, prompts: Sequence[Sequence[int]], long: Sequence[int]
) -> tuple[float, float]:
    """Median gap before a long prompt arrives, and the 99th percentile of the gaps during its prefill; seconds."""
    streams = [Stream(stub, prompt, 700) for prompt in prompts]
    running = [asyncio.create_task(stream.run()) for stream in streams]
    for stream in streams:
        await stream.under_way.wait()
    arrived = time.perf_counter()
    newcomer = Stream(stub, long, 1)
    await newcomer.run()
    done = newcomer.arrivals[0][0]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    gaps = [pair for stream in streams for pair in stream.gaps[20:]]
    before = statistics.median(gap for at, gap in gaps if at <= arrived)
    during = statistics.quantiles((gap for at, gap in gaps if arrived < at <= done), n=100)[98]
    return before, during


def loop_seconds(process: psutil.Process) -> float:
    """Processor time of the server's event loop, which is its first thread."""
    times = next(thread for thread in process.threads() if thread.id == process.pid)
    return float(times.user_time + times.system_time)


def python_seconds(load: Load) -> float:
    """Time of the engine's steps outside llama.cpp's decode."""
    return load.busy_seconds - load.decode_seconds


async def measure(model: Path, rounds: int, threads: int) -> Report:
    """Run everything `rounds` times, service and bare loop in turn."""
    options = ("--slots", str(SLOTS), "--context", str(CONTEXT), "--threads", str(threads))
    report = Report()
    async with bare(model, *options) as peer, server(model, *options) as (client, process):
        prompts = [await client.tokenize(text) for text in OPENINGS]
        long = (await client.tokenize(" ".join(OPENINGS) * 40))[:LONG_PROMPT]
        async with grpc.aio.insecure_channel(client.target) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            for _ in range(rounds):
                for n in STREAMS:
                    report.note(f"bare {n}", await peer.generate(prompts[:n], TOKENS))
                    cpu, load = loop_seconds(process), await client.load()
                    report.note(f"service {n}", await throughput(stub, prompts[:n]))
                    after = await client.load()
                tokens, steps = after.generated_tokens - load.generated_tokens, after.steps - load.steps
                report.note("loop", (loop_seconds(process) - cpu) / tokens)
                report.note("python", (python_seconds(after) - python_seconds(load)) / steps)
            for _ in range(max(rounds // 2, 1)):
                for slot in range(SLOTS):  # what other conversations left in the cache would cost the prompt its speed
                    await client.erase_slot(slot)
                report.note("bare prefill", await peer.prefill(long))
                alone = Stream(stub, long, 1)
                began = time.perf_counter()
                await alone.run()
                report.note("prefill", len(long) / (alone.arrivals[0][0] - began))
                before, during = await pace(stub, prompts[: SLOTS - 1], long)
                report.note("before", before)
                report.note("during", during)
    return report


def table(report: Report) -> str:
    """A Markdown table of the report."""
    lines = ["| streams | service tokens/s | bare tokens/s | ratio |", "|---|---|---|---|"]
    for n in STREAMS:
        service, peer = report.median(f"service {n}"), report.median(f"bare {n}")
        lines.append(f"| {n} | {service:.0f} | {peer:.0f} | {report.ratio(f'service {n}', f'bare {n}'):.3f} |")
    before, during = report.median("before") * 1e3, report.median("during") * 1e3
    prefill, peer = report.median("prefill"), report.median("bare prefill")
    lines += [
        "",
        f"- Event loop: {report.median('loop') * 1e6:.0f} µs of processor time a token at {max(STREAMS)} streams.",
        f"- Engine without llama.cpp's decode: {report.median('python') * 1e6:.0f} µs a step.",
        f"- A prompt of {LONG_PROMPT:,} tokens beside {SLOTS - 1} streams: gaps of {before:.1f} ms before, "
        f"{during:.1f} ms at the 99th percentile during it ({report.ratio('during', 'before'):.2f} times).",
        f"- Prefill alone: {prefill:.0f} tokens/s, bare {peer:.0f} ({report.ratio('prefill', 'bare prefill'):.3f}).",
    ]
    return "\n".join(lines)
