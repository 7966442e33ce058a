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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import psutil

from bench.processes import Bare, bare, server
from slotwire.v1 import generation_pb2 as pb
from slotwire.v1 import generation_pb2_grpc as pb_grpc
from slotwire.v1 import sampling_pb2 as sp
from slotwire_client import Client, Load

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


@dataclass(slots=True)
class Report:
    """Medians over the rounds. Rates are tokens a second, times are seconds unless named otherwise."""

    service: dict[int, float] = field(default_factory=dict)
    bare: dict[int, float] = field(default_factory=dict)
    loop_cpu_us_per_token: float = 0.0
    engine_python_us_per_step: float = 0.0
    pace_before_ms: float = 0.0
    pace_during_p99_ms: float = 0.0
    prefill: float = 0.0
    bare_prefill: float = 0.0

    @property
    def ratios(self) -> dict[str, float]:
        """What the goals are about."""
        ratios = {f"throughput at {n}": self.service[n] / self.bare[n] for n in self.service}
        ratios["pace p99 during a prompt"] = self.pace_during_p99_ms / self.pace_before_ms
        ratios["prefill"] = self.prefill / self.bare_prefill
        return ratios

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"ratios": self.ratios}


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
    options = ("--slots", str(SLOTS), "--context", str(CONTEXT), "--threads", str(threads))
    runs: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        runs.setdefault(name, []).append(value)

    async with bare(model, *options) as peer, server(model, *options) as (client, process):
        prompts = [await client.tokenize(text) for text in OPENINGS]
        long = (list(await client.tokenize(" ".join(OPENINGS) * 40)))[:LONG_PROMPT]
        async with grpc.aio.insecure_channel(client.target) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            for _ in range(rounds):
                await _round(client, process, stub, peer, prompts, long, note)
    median = {name: statistics.median(values) for name, values in runs.items()}
    return Report(
        service={n: median[f"service {n}"] for n in STREAMS},
        bare={n: median[f"bare {n}"] for n in STREAMS},
        loop_cpu_us_per_token=median["loop"] * 1e6,
        engine_python_us_per_step=median["python"] * 1e6,
        pace_before_ms=median["before"] * 1e3,
        pace_during_p99_ms=median["during"] * 1e3,
        prefill=median["prefill"],
        bare_prefill=median["bare prefill"],
    )


async def _round(
    client: Client,
    process: psutil.Process,
    stub: pb_grpc.GenerationServiceAsyncStub,
    peer: Bare,
    prompts: list[tuple[int, ...]],
    long: list[int],
    note: Callable[[str, float], None],
) -> None:
    for n in STREAMS:
        note(f"bare {n}", await peer.generate(prompts[:n], TOKENS))
        cpu, load = loop_seconds(process), await client.load()
        note(f"service {n}", await throughput(stub, prompts[:n]))
        after = await client.load()
        if n == max(STREAMS):
            note("loop", (loop_seconds(process) - cpu) / (after.generated_tokens - load.generated_tokens))
            note("python", (python_seconds(after) - python_seconds(load)) / (after.steps - load.steps))
    note("bare prefill", await peer.prefill(long))
    alone = Stream(stub, long, 1)
    began = time.perf_counter()
    await alone.run()
    note("prefill", len(long) / (alone.arrivals[0][0] - began))
    before, during = await pace(stub, prompts[: SLOTS - 1], long)
    note("before", before)
    note("during", during)


def table(report: Report) -> str:
    """A Markdown table of the report."""
    lines = ["| streams | service tokens/s | bare tokens/s | ratio |", "|---|---|---|---|"]
    lines += [
        f"| {n} | {report.service[n]:.0f} | {report.bare[n]:.0f} | {report.service[n] / report.bare[n]:.3f} |"
        for n in report.service
    ]
    ratios = report.ratios
    lines += [
        "",
        f"- Event loop: {report.loop_cpu_us_per_token:.0f} µs of processor time a token at {max(STREAMS)} streams.",
        f"- Engine without llama.cpp's decode: {report.engine_python_us_per_step:.0f} µs a step.",
        f"- A prompt of {LONG_PROMPT:,} tokens beside {SLOTS - 1} streams: gap {report.pace_before_ms:.1f} ms before, "
        f"{report.pace_during_p99_ms:.1f} ms at the 99th percentile during it "
        f"({ratios['pace p99 during a prompt']:.2f} times).",
        f"- Prefill alone: {report.prefill:.0f} tokens/s, bare {report.bare_prefill:.0f} ({ratios['prefill']:.3f}).",
    ]
    return "\n".join(lines)
