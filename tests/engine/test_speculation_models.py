"""Speculation on real models: with and without drafts, the text is the same, token for token.

All runs are deterministic ones, so that equality can be asked for; snapshots do not go with that, see below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from service.engine.core import Core
from service.engine.llama import LlamaRunner, load_runner
from service.engine.sequence import Sequence
from service.engine.settings import ContextSettings, DraftSource, ModelSettings, SchedulingSettings, SpeculationSettings
from service.engine.tempo import Candidate
from service.engine.types import Delta, DraftOptions, Event, Finished, Request, Rollback, Sampling, TokenLogprob
from service.errors import SlotwireError
from tests import random_models
from tests.conftest import MODELS, TINY

TINY_DRAFT = MODELS / "tiny-hybrid-draft.Q8_0.gguf"
KINDS = ("hybrid", "mamba2", "llama", "sliding_window")
MAX_STEPS = 4000
TOKENS = 40
PROMPTS = tuple([1, *(300 + (7 * i * (1 + stream)) % 90 for i in range(24 + 9 * stream))] for stream in range(4))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Target and draft by kind of memory."""
    folder = tmp_path_factory.mktemp("models")
    found = {"hybrid": (TINY, TINY_DRAFT)}
    for kind in KINDS[1:]:
        plain = getattr(random_models, kind)(folder / f"{kind}.gguf")
        draft = random_models.draft_of(plain, folder / f"{kind}-draft.gguf", noise=0.02)
        found[kind] = random_models.quantized(plain, folder / f"{kind}.Q8_0.gguf"), draft
    return found


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, event: Event | SlotwireError) -> None:
        if isinstance(event, SlotwireError):
            raise event
        if isinstance(event, Delta):
            self.tokens += event.tokens
            self.logprobs += event.logprobs
        if isinstance(event, Finished):
            self.finished = event


class Bench:
    """A core on a real model that drafts `drafted` tokens in each round, whether that pays or not."""

    def __init__(self, runner: LlamaRunner, speculation: SpeculationSettings, drafted: int = 3) -> None:
        self.runner = runner
        self.core = Core(runner, SchedulingSettings(), speculation)
        if self.core._speculation is not None:
            self.core._speculation.tempo.choose = lambda candidates, *_: always(candidates, drafted)  # type: ignore[method-assign]
        self.answers: dict[str, Answer] = {}

    def submit(self, request: Request) -> None:
        self.answers[request.id] = Answer()
        self.core.submit(Sequence(request, self.runner.make_sampler(request)))

    def step(self) -> bool:
        worked = self.core.step()
        for name, event in self.core.take_outcomes():
            self.answers[name].add(event)
        return worked

    def run(self) -> dict[str, Answer]:
        for _ in range(MAX_STEPS):
            if not self.step():
                return self.answers
        pytest.fail(f"not done after {MAX_STEPS} steps")


def always(candidates: list[Candidate], count: int) -> list[int]:
    return [min(count, candidate.limit) for candidate in candidates]


@contextlib.contextmanager
def loaded(
    pair: tuple[Path, Path], source: DraftSource, *, slots: int = 4, drafted: int = 3, **context: object
) -> Iterator[Bench]:
    rollback = context.pop("rollback", "auto")
    with_model = source in ("model", "both")
    speculation = SpeculationSettings(
        draft=source, draft_model=pair[1] if with_model else None, draft_max=8, rollback=rollback  # type: ignore[arg-type]
    )
    fields = {"context": 1024, "slots": slots, "threads": 1, "deterministic": True} | context
    runner = load_runner(pair[0], ModelSettings(), ContextSettings(**fields), speculation)  # type: ignore[arg-type]
    try:
        yield Bench(runner, speculation, drafted)
    finally:
        runner.close()


def requests(streams: int, *, temperature: float, n_max: int | None = None, tokens: int = TOKENS) -> list[Request]:
    sampling = Sampling(temperature=temperature, seed=7, ignore_eos=True)
    return [
        Request(f"r{i}", tuple(PROMPTS[i]), sampling, max_tokens=tokens, logprobs=2, draft=DraftOptions(n_max=n_max))
        for i in range(streams)
    ]


@pytest.fixture(scope="session")
def plain(models: dict[str, tuple[Path, Path]]) -> dict[tuple[str, float], list[Answer]]:
    """The texts without drafts, each alone in its server."""
    found = {}
    for kind, pair in models.items():
        with loaded(pair, "none") as bench:
            assert bench.runner.info.capabilities.deterministic
            for temperature in (0.0, 0.8):
                answers = []
                for request in requests(4, temperature=temperature):
                    bench.submit(request)
                    answers.append(bench.run()[request.id])
                found[kind, temperature] = answers
    return found


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("source", ["model", "ngram", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_without_drafts(
    models: dict[str, tuple[Path, Path]],
    plain: dict[tuple[str, float], list[Answer]],
    kind: str,
    source: DraftSource,
    streams: int,
) -> None:
    drafted = rounds = 0
    with loaded(models[kind], source) as bench:
        expected = Rollback.TRIM if kind in ("llama", "sliding_window") else Rollback.CHECKPOINT
        assert bench.runner.info.capabilities.rollback is expected
        for temperature in (0.0, 0.8):
            for request in requests(streams, temperature=temperature):
                bench.submit(request)
            for answer, alone in zip(bench.run().values(), plain[kind, temperature], strict=False):
                assert answer.tokens == alone.tokens
                ours = [entry.logprob for entry in answer.logprobs]
                assert np.allclose(ours, [entry.logprob for entry in alone.logprobs], atol=1e-3)
                assert answer.finished is not None
                drafted += answer.finished.speculation.drafted
                rounds += answer.finished.speculation.rounds
        load = bench.core.load()
        if expected is Rollback.CHECKPOINT:
            assert len(bench.runner._context.memory._checkpoints) <= 4
            assert load.decodes <= load.steps
    assert drafted > 20 or (source == "ngram" and kind != "hybrid")
