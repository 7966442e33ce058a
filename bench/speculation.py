"""Speculation against the same server without it: what drafts gain where they pay, and cost where they do not.

    python -m bench speculation [--rounds 3] [--json FILE]

Both servers run side by side and take turns; the one that waits is idle. A rate is the sum of what each stream got, in
tokens a second from its first token to its last. All is greedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.engine import OPENINGS
from bench.models import smollm2
from bench.processes import server
from service.config import default_model
from slotwire_client import Client, GenerationResult, Load

TOKENS = 128
LIST = "\n".join(f"- item {index:03d}: a red box on shelf {index * 7 % 40}" for index in range(24))
COPYING = f"Copy this list, line by line, exactly as it is.\n\n{LIST}\n\nThe copy:\n\n{LIST[:400]}"
CODE = "\n".join(
    f"def handle_{name}(request):\n    value = request.get('{name}')\n    return respond(value)\n"
    for name in ("user", "order", "price", "city", "street", "phone", "email", "title")
)
EDITING = f"Rename the function respond to answer and leave the rest as it is.\n\n{CODE}\n\nThe result:\n\n{CODE[:500]}"
REPETITIVE = (COPYING, EDITING)


@dataclass(slots=True)
class Figures:
    """Rates by the name of the measurement, those with drafts and those without, in pairs of the same moment."""

    drafting: dict[str, list[float]] = field(default_factory=dict)
    plain: dict[str, list[float]] = field(default_factory=dict)
    loads: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, name: str, drafting: float, plain: float) -> None:
        self.drafting.setdefault(name, []).append(drafting)
        self.plain.setdefault(name, []).append(plain)

    def ratio(self, name: str) -> float:
        return statistics.median(a / b for a, b in zip(self.drafting[name], self.plain[name], strict=True))

    def table(self) -> str:
        rows = ["| work | with | without | ratio (each round) |", "|---|---|---|---|"]
        for name in self.drafting:
            pairs = zip(self.drafting[name], self.plain[name], strict=True)
            each = ", ".join(f"{a / b:.2f}" for a, b in pairs)
            rows.append(
                f"| {name} | {statistics.median(self.drafting[name]):.1f} | {statistics.median(self.plain[name]):.1f} "
                f"| {self.ratio(name):.2f} ({each}) |"
            )
        return "\n".join([*rows, "", *(f"{name}: {load}" for name, load in self.loads.items())])

    def as_dict(self) -> dict[str, object]:
        return {
            "ratios": {name: self.ratio(name) for name in self.drafting},
            "with": self.drafting,
            "without": self.plain,
            "loads": self.loads,
        }


async def rate(client: Client, prompts: Sequence[str], tokens: int = TOKENS) -> float:
    """Tokens a second of all streams together."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_answer(client, prompt, tokens)) for prompt in prompts]
    return sum(_rate(task.result()) for task in tasks)


async def _answer(client: Client, prompt: str, tokens: int) -> GenerationResult:
    generation = client.generate(
        prompt, max_tokens=tokens, temperature=0, ignore_eos=True, timings=True, reuse_prefix=False
    )
    async with generation:
        return await generation.complete()


def _rate(result: GenerationResult) -> float:
    assert result.timings is not None
    return (result.usage.generated_tokens - 1) / result.timings.generation


@contextlib.asynccontextmanager
async def pair(
    target: Path, with_drafts: Sequence[str], without: Sequence[str]
) -> AsyncIterator[tuple[Client, Client]]:
    """Two servers of one model with different options."""
    common = ("--slots", "8", "--context", "8192")
    async with server(target, *common, *with_drafts) as (drafting, _), server(target, *common, *without) as (plain, _):
        for client in (drafting, plain):  # libraries warm up, and costs become known
            await rate(client, OPENINGS[:1], 32)
        yield drafting, plain


async def compare(
    figures: Figures, name: str, clients: tuple[Client, Client], prompts: Sequence[Sequence[str]], rounds: int
) -> None:
    """Each of `prompts` is one set of streams; a round runs all sets, on one server and then on the other."""
    before = await clients[0].load()
    for turn in range(rounds):
        rates: list[float] = [0.0, 0.0]
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        for side in order:
            inverse = [1 / await rate(clients[side], streams) for streams in prompts]
            rates[side] = len(inverse) / sum(inverse)
        figures.note(name, *rates)
    figures.loads[name] = _spent(before, await clients[0].load())


def _spent(before: Load, after: Load) -> dict[str, float]:
    """What the server with drafts did, in ratios that do not depend on the machine."""
    generated = after.generated_tokens - before.generated_tokens
    drafted = after.drafted_tokens - before.drafted_tokens
    return {
        "decodes a token": round((after.decodes - before.decodes) / generated, 3),
        "drafted a token": round(drafted / generated, 3),
        "accepted": round((after.accepted_tokens - before.accepted_tokens) / max(drafted, 1), 3),
        "replayed a token": round((after.replayed_tokens - before.replayed_tokens) / generated, 3),
    }


async def measure(rounds: int, tiny: Path | None) -> Figures:
    """All comparisons; `tiny` is the folder of the tiny hybrid and its draft."""
    figures = Figures()
    with_model = ("--draft", "model", "--draft-model", str(default_model().path))
    async with pair(smollm2("F32"), with_model, ()) as clients:
        for streams in (1, 4):
            await compare(figures, f"draft model, {streams} streams", clients, _prose(streams), rounds)
    async with pair(smollm2("Q4_0"), ("--draft", "ngram"), ()) as clients:
        await compare(figures, "n-grams, repetitive", clients, [[text] for text in REPETITIVE], rounds)
        for streams in (1, 2, 4):
            await compare(figures, f"n-grams, prose, {streams} streams", clients, _prose(streams), rounds)
        mixed = [[text] for pairs in zip(REPETITIVE * 2, OPENINGS[:4], strict=True) for text in pairs]
        await compare(figures, "n-grams, mixed", clients, mixed, rounds)
    for keys in ("f16", "q8_0"):
        options = ("--deterministic", "--cache-type-k", keys)
        async with pair(smollm2("Q4_0"), options, ()) as clients:
            for streams in (1, 8):
                name = f"deterministic, {keys} keys, {streams} streams"
                await compare(figures, name, clients, _prose(streams), rounds)
    if tiny is not None:
        target, draft = tiny / "tiny-hybrid.Q8_0.gguf", tiny / "tiny-hybrid-draft.Q8_0.gguf"
        for rollback in ("snapshots", "checkpoint"):
            options = ("--draft-model", str(draft), "--rollback", rollback)
            async with pair(target, options, ()) as clients:
                for streams in (1, 4):
                    name = f"tiny hybrid, {rollback}, {streams} streams"
                    await compare(figures, name, clients, _prose(streams), rounds)
    return figures


def _prose(streams: int) -> list[list[str]]:
    """The unrelated openings, as many at a time as there are streams."""
    count = max(streams, 4)
    return [list(OPENINGS[start : start + streams]) for start in range(0, count, streams)]
