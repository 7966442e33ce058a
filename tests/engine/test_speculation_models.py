"""Speculation on real models: with and without drafts, the text is the same, token for token.

All runs are deterministic ones, so that equality can be asked for; snapshots do not go with that, see below.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from service.config import default_model
from service.engine.core import Core
from service.engine.llama import LlamaRunner, load_runner
from service.engine.sequence import Sequence
from service.engine.settings import ContextSettings, DraftSource, ModelSettings, SchedulingSettings, SpeculationSettings
from service.engine.tempo import Candidate
from service.engine.types import (
    Delta,
    DraftOptions,
    Dry,
    Event,
    Finished,
    Mirostat,
    Penalties,
    Request,
    Rollback,
    Sampling,
    TokenLogprob,
    Xtc,
)
from service.errors import ConfigError, SlotwireError
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

    def __init__(
        self, runner: LlamaRunner, speculation: SpeculationSettings, drafted: int = 3, cache_memory: int = 0
    ) -> None:
        self.runner = runner
        self.core = Core(runner, SchedulingSettings(cache_memory=cache_memory), speculation)
        if self.core._speculation is not None:
            self.core._speculation.tempo.choose = lambda candidates, *_: always(candidates, drafted)  # type: ignore[method-assign]
        self.answers: dict[str, Answer] = {}

    def submit(self, request: Request) -> None:
        self.answers[request.id] = Answer()
        self.core.submit(Sequence(request, self.runner.make_sampler(request)))

    def answer(self, request: Request) -> Answer:
        self.submit(request)
        return self.run()[request.id]

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
    rollback, memory = context.pop("rollback", "auto"), context.pop("cache_memory", 0)
    with_model = source in ("model", "both")
    speculation = SpeculationSettings(
        draft=source,
        draft_model=pair[1] if with_model else None,
        draft_max=8,
        rollback=rollback,  # type: ignore[arg-type]
    )
    fields = {"context": 1024, "slots": slots, "threads": 1, "deterministic": True} | context
    runner = load_runner(pair[0], ModelSettings(), ContextSettings(**fields), speculation)  # type: ignore[arg-type]
    try:
        yield Bench(runner, speculation, drafted, memory)  # type: ignore[arg-type]
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
    """The texts without drafts, one after the other; of sliding windows each in a server of its own, because what was
    there before changes their bits.
    """
    found = {}
    for kind, pair in models.items():
        promised = kind != "sliding_window"
        asked = {temperature: requests(4, temperature=temperature) for temperature in (0.0, 0.8)}
        if promised:
            with loaded(pair, "none") as bench:
                assert bench.runner.info.capabilities.deterministic
                found |= {(kind, t): [bench.answer(request) for request in asked[t]] for t in asked}
            continue
        for temperature, texts in asked.items():
            found[kind, temperature] = []
            for request in texts:
                with loaded(pair, "none") as bench:
                    assert not bench.runner.info.capabilities.deterministic
                    found[kind, temperature].append(bench.answer(request))
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
    drafted = 0
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
        assert len(bench.runner._context.memory._checkpoints) <= (4 if expected is Rollback.CHECKPOINT else 0)
    assert drafted > 20 or source == "ngram"  # random models do not repeat themselves


def test_snapshots_give_the_same_text(models: dict[str, tuple[Path, Path]]) -> None:
    """Snapshots do not go with deterministic mode. In the default mode a draft turns a token where the two likeliest
    ones are close: here less than 0.3 apart.
    """
    target = {"deterministic": False, "slots": 2}
    texts = []
    for source in ("none", "model"):
        with loaded(models["hybrid"], source, rollback="snapshots" if source == "model" else "auto", **target) as bench:
            if source == "model":
                assert bench.runner.info.capabilities.rollback is Rollback.SNAPSHOTS
            for request in requests(2, temperature=0):
                bench.submit(request)
            texts.append(list(bench.run().values()))
    for plain, drafted in zip(*texts, strict=True):
        assert drafted.finished is not None
        assert drafted.finished.speculation.accepted > 5
        assert drafted.finished.speculation.accepted < drafted.finished.speculation.drafted
        assert drafted.finished.speculation.replayed == 0
        agree = [a == b for a, b in zip(plain.tokens, drafted.tokens, strict=True)]
        if not all(agree):
            (first, second) = plain.logprobs[agree.index(False)].top
            assert first[1] - second[1] < 0.3


def test_ngrams_on_a_hybrid_for_500_tokens(models: dict[str, tuple[Path, Path]]) -> None:
    sampling = Sampling(temperature=0, ignore_eos=True)
    texts = []
    for n_max in (0, None):
        with loaded(models["hybrid"], "ngram", slots=1, drafted=8) as bench:
            bench.submit(Request("a", tuple(PROMPTS[0]), sampling, max_tokens=500, draft=DraftOptions(n_max=n_max)))
            answer = bench.run()["a"]
            texts.append(answer.tokens)
            load = bench.core.load()
    assert texts[0] == texts[1]
    assert answer.finished is not None
    done = answer.finished.speculation
    assert done.accepted > 100
    plain = load.decodes - load.rounds - load.flushes - 1  # neither draft nor replay; one for the prompt
    assert load.decodes == len(texts[1]) - done.accepted
    assert plain >= 0
    assert load.checkpoints <= load.rounds


def test_turns_with_and_without_drafts_on_one_slot(models: dict[str, tuple[Path, Path]]) -> None:
    histories = []
    for pattern in ((0, 0, 0, 0), (None, 0, None, None)):
        history = list(PROMPTS[0])
        with loaded(models["hybrid"], "both", slots=1) as bench:
            for turn, n_max in enumerate(pattern):
                request = Request(
                    f"t{turn}", tuple(history), Sampling(temperature=0), max_tokens=20, draft=DraftOptions(n_max=n_max)
                )
                bench.submit(request)
                history += [*bench.run()[request.id].tokens, 350 + turn]
        histories.append(history)
    assert histories[0] == histories[1]


def test_a_grammar_that_forbids_the_drafts_tokens(models: dict[str, tuple[Path, Path]]) -> None:
    sampling = Sampling(temperature=0.8, seed=3, grammar='root ::= ("a" | "b" | "c")+')
    texts = []
    for n_max in (0, None):
        with loaded(models["hybrid"], "model", slots=1) as bench:
            bench.submit(Request("a", tuple(PROMPTS[1]), sampling, max_tokens=30, draft=DraftOptions(n_max=n_max)))
            answer = bench.run()["a"]
            texts.append(answer.tokens)
    assert texts[0] == texts[1]
    assert answer.finished is not None
    assert answer.finished.speculation.drafted > answer.finished.speculation.accepted


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8, seed=5, penalties=Penalties(window=32, repeat=1.3, frequency=0.2), ignore_eos=True),
        Sampling(temperature=1.0, seed=5, mirostat=Mirostat(), ignore_eos=True),
        Sampling(temperature=0.9, seed=5, dry=Dry(multiplier=0.8), xtc=Xtc(0.5, 0.05), ignore_eos=True),
    ],
)
def test_the_samplers_state_is_that_of_one_token_at_a_time(
    models: dict[str, tuple[Path, Path]], sampling: Sampling
) -> None:
    texts = []
    for n_max in (0, None):
        with loaded(models["hybrid"], "both", slots=1) as bench:
            bench.submit(Request("a", tuple(PROMPTS[2]), sampling, max_tokens=60, draft=DraftOptions(n_max=n_max)))
            texts.append(bench.run()["a"].tokens)
    assert texts[0] == texts[1]


def test_a_rollback_that_does_not_work_is_refused(models: dict[str, tuple[Path, Path]]) -> None:
    for kind, rollback in (
        ("llama", "checkpoint"),
        ("llama", "snapshots"),
        ("mamba2", "snapshots"),
        ("hybrid", "trim"),
    ):
        with (
            pytest.raises(ConfigError, match=f"rollback: {rollback} "),
            loaded(models[kind], "ngram", rollback=rollback),
        ):
            pass


def test_another_vocabulary_is_refused(models: dict[str, tuple[Path, Path]]) -> None:
    target, _ = models["llama"]
    with (
        pytest.raises(ConfigError, match=r"draft_model: .*token \d+ is "),
        loaded((target, default_model().path), "model"),
    ):
        pass


def test_drawing_with_drafts_has_the_models_distribution(models: dict[str, tuple[Path, Path]]) -> None:
    """The second token of many short samples, with and without drafts, compared by chi-square."""
    counts = []
    for n_max in (0, None):
        with loaded(models["hybrid"], "model", slots=4, deterministic=False) as bench:
            for number in range(2000):
                sampling = Sampling(temperature=1.0, top_k=8, min_p=0, top_p=1, seed=number + (n_max is None) * 10_000)
                bench.submit(
                    Request(
                        f"r{number}", tuple(PROMPTS[0][:9]), sampling, max_tokens=3, draft=DraftOptions(n_max=n_max)
                    )
                )
                bench.run()
            tokens = [answer.tokens for answer in bench.answers.values()]
            counts.append(Counter(tuple(drawn[:2]) for drawn in tokens))
    common = [pair for pair, count in (counts[0] + counts[1]).items() if count >= 20]
    rest = [sum(count.values()) - sum(count[pair] for pair in common) for count in counts]
    table = np.array([[count[pair] for pair in common] + [other] for count, other in zip(counts, rest, strict=True)])
    table = table[:, table.sum(axis=0) > 0]
    expected = table.sum(axis=0) / 2
    statistic = float(((table - expected) ** 2 / expected).sum())
    freedom = table.shape[1] - 1
    assert freedom >= 5
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # mean and standard deviation of chi-square
