"""The models with random weights, and what the runner says about their kinds of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from service.engine.batch import DecodeStatus, Logits, Segment
from service.engine.llama import LlamaRunner, load_runner
from service.engine.settings import ContextSettings, ModelSettings
from service.engine.types import Capabilities, Rollback
from tests import random_models
from tests.random_models import EXACT, Array

Write = Callable[..., Path]
PROMPT: list[int] = np.random.default_rng(7).integers(2, 2048, 400).tolist()

ATTENTION = Capabilities(trim=True, recurrent=False, hybrid=False, sliding_window=0, rollback=Rollback.TRIM)
WINDOW = Capabilities(
    trim=True, recurrent=False, hybrid=False, sliding_window=32, rollback=Rollback.TRIM, context_checkpoints=True
)
RECURRENT = Capabilities(
    trim=False, recurrent=True, hybrid=False, sliding_window=0, rollback=Rollback.CHECKPOINT, context_checkpoints=True
)

small_models = pytest.mark.parametrize(
    "write", [random_models.llama, random_models.sliding_window, random_models.mamba2], ids=lambda write: write.__name__
)


@contextlib.contextmanager
def loaded(path: Path, **context: object) -> Iterator[LlamaRunner]:
    fields = {"context": 1024, "slots": 2, "threads": 1} | context
    runner = load_runner(path, ModelSettings(), ContextSettings(**fields))  # type: ignore[arg-type]
    with contextlib.closing(runner):
        yield runner


def prefill(runner: LlamaRunner, tokens: list[int], *, start: int = 0, rows: int = 32, slot: int = 0) -> Logits:
    """Decode `tokens[start:]` in chunks of `rows`; returns the logits of the last one."""
    for at in range(start, len(tokens), rows):
        chunk = tokens[at : at + rows]
        assert runner.decode([Segment(slot, chunk, at, outputs=1)]) is DecodeStatus.OK
    return runner.logits(0).copy()


def greedy(runner: LlamaRunner, prompt: list[int], count: int = 64, *, rows: int = 32, slot: int = 0) -> list[int]:
    """The next `count` tokens, one by one, from an empty slot."""
    runner.keep(slot, 0)
    text = [*prompt, int(prefill(runner, prompt, rows=rows, slot=slot).argmax())]
    while len(text) < len(prompt) + count:
        text.append(int(prefill(runner, text, start=len(text) - 1, slot=slot).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    ("write", "architecture", "capabilities"),
    [
        (random_models.llama, "llama", ATTENTION),
        (random_models.sliding_window, "cohere2", WINDOW),
        (random_models.mamba2, "mamba2", RECURRENT),
    ],
)
def test_kind_of_memory(tmp_path: Path, write: Write, architecture: str, capabilities: Capabilities) -> None:
    with loaded(write(tmp_path / "a.gguf")) as runner:
        assert runner.info.architecture == architecture
        assert runner.info.capabilities == capabilities
        assert (runner.info.vocabulary_size, runner.info.trained_context) == (2048, random_models.CONTEXT)


@small_models
def test_greedy_text_is_reproducible_and_varied(tmp_path: Path, write: Write) -> None:
    with loaded(write(tmp_path / "a.gguf")) as runner:
        for prompt in ([0], PROMPT[:20], PROMPT[:200]):
            text = greedy(runner, prompt)
            assert text == greedy(runner, prompt)
            assert len(set(text)) >= 10
            assert not runner.end_tokens & set(text)


@small_models
def test_all_of_the_prompt_matters(tmp_path: Path, write: Write) -> None:
    """The first of 100 tokens changes the logits after the last one by far more than rounding does."""
    other = [PROMPT[1], *PROMPT[1:100]]
    with loaded(write(tmp_path / "a.gguf"), **EXACT) as runner:
        logits = prefill(runner, PROMPT[:100])
        assert np.abs(logits - prefill(runner, other, slot=1)).max() > 0.05


@small_models
def test_chunks_of_a_prompt_do_not_matter(tmp_path: Path, write: Write) -> None:
    """Logits after the prompt agree to 0.001 (their standard deviation is 4), and so the greedy texts are equal."""
    with loaded(write(tmp_path / "a.gguf"), **EXACT) as runner:
        prompt = PROMPT[:100]
        logits, text = prefill(runner, prompt, rows=100), greedy(runner, prompt, rows=100)
        for rows in (1, 7, 64):
            runner.keep(1, 0)
            assert np.abs(logits - prefill(runner, prompt, rows=rows, slot=1)).max() < 0.001
            assert greedy(runner, prompt, rows=rows, slot=1) == text


@small_models
def test_the_seed_makes_the_model(tmp_path: Path, write: Write) -> None:
    first, again = write(tmp_path / "a.gguf"), write(tmp_path / "b.gguf", seed=1)
    assert first.read_bytes() == again.read_bytes()
    with loaded(first) as runner, loaded(write(tmp_path / "c.gguf", seed=2)) as other:
        assert greedy(runner, PROMPT[:20]) != greedy(other, PROMPT[:20])


def test_attention_goes_back_anywhere(tmp_path: Path) -> None:
    with loaded(random_models.llama(tmp_path / "a.gguf"), **EXACT) as runner:
        before = prefill(runner, PROMPT[:101])
        prefill(runner, PROMPT, start=101)
        assert runner.keep(0, 100) == 100
        assert np.abs(before - prefill(runner, PROMPT[:101], start=100)).max() < 0.001


def test_recurrence_goes_back_nowhere(tmp_path: Path) -> None:
    with loaded(random_models.mamba2(tmp_path / "a.gguf"), **EXACT) as runner:
        before = prefill(runner, PROMPT[:200])
        assert runner.keep(0, 199) == 0
        assert np.abs(before - prefill(runner, PROMPT[:200])).max() < 0.001


def test_a_window_that_is_still_there(tmp_path: Path) -> None:
    """256 cells for the window: 400 tokens leave those from 144 on, so position 176 has its window of 32."""
    with loaded(random_models.sliding_window(tmp_path / "a.gguf"), ubatch=32, **EXACT) as runner:
        for length in (399, 300, 176):
            fresh = prefill(runner, PROMPT[: length + 1], slot=1)
            runner.keep(1, 0)
            prefill(runner, PROMPT)
            assert runner.keep(0, length) == length
            assert np.abs(fresh - prefill(runner, PROMPT[: length + 1], start=length)).max() < 0.001
            runner.keep(0, 0)


def test_a_window_that_was_lost(tmp_path: Path) -> None:
    with loaded(random_models.sliding_window(tmp_path / "a.gguf"), ubatch=32, **EXACT) as runner:
        fresh = prefill(runner, PROMPT[:101], slot=1)
        runner.keep(1, 0)
        prefill(runner, PROMPT)
        assert runner.keep(0, 100) == 0
        assert np.abs(fresh - prefill(runner, PROMPT[:101])).max() < 0.001


@pytest.mark.parametrize("context", [{}, {"ubatch": 32, "swa_full": True}], ids=["short", "swa_full"])
def test_a_window_that_nothing_pushed_out(tmp_path: Path, context: dict[str, object]) -> None:
    """With room for more than the prompt in the cells of the window, none of it is lost."""
    with loaded(random_models.sliding_window(tmp_path / "a.gguf"), **EXACT, **context) as runner:
        before = prefill(runner, PROMPT[:101])
        prefill(runner, PROMPT, start=101)
        assert runner.keep(0, 100) == 100
        assert np.abs(before - prefill(runner, PROMPT[:101], start=100)).max() < 0.001


def test_wide_states(tmp_path: Path) -> None:
    size = 1 << 18
    path = random_models.wide(tmp_path / "a.gguf", kv_bytes_per_token=size)
    with loaded(path, context=256) as runner:
        assert runner.info.capabilities == ATTENTION
        text = greedy(runner, PROMPT[:20], 32)
        assert len(set(text)) >= 10
        assert text == greedy(runner, PROMPT[:20], 32)
        state = llama_cpp.llama_state_seq_get_size(runner._context.handle, 0)
        assert state == pytest.approx(51 * size, rel=0.001)  # the last token was drawn but not decoded


def test_wide_states_have_whole_heads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1000 is not a positive multiple"):
        random_models.wide(tmp_path / "a.gguf", kv_bytes_per_token=1000)


def test_noise_sets_how_often_a_draft_agrees(tmp_path: Path) -> None:
    source = random_models.llama(tmp_path / "a.gguf")
    assert random_models.draft_of(source, tmp_path / "b.gguf", noise=0).read_bytes() == source.read_bytes()
    with loaded(source) as runner:
        choices = _choices(runner)
    shares = []
    for noise in (0.01, 0.05, 1):
        with loaded(random_models.draft_of(source, tmp_path / "b.gguf", noise=noise)) as draft:
            shares.append(float(np.mean(_choices(draft) == choices)))
    assert shares == pytest.approx([0.82, 0.37, 0], abs=0.12)


def _choices(runner: LlamaRunner) -> Array:
    """The greedy token after each of 250 tokens."""
    return np.array([prefill(runner, PROMPT[: at + 1], start=at).argmax() for at in range(250)])


def test_a_draft_needs_plain_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is Q8_0, not F32"):
        random_models.draft_of(random_models.VOCABULARY_OF, tmp_path / "a.gguf", noise=0.1)
