"""The runner on real models: settings reach llama.cpp, and what it cannot do is an error that says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from service.engine.batch import DecodeStatus, Segment
from service.engine.llama import LlamaRunner, load_runner
from service.engine.settings import ContextSettings, ModelSettings
from service.engine.types import Penalties, Request, Sampling
from service.errors import ConfigError
from tests import random_models
from tests.conftest import TINY

PROMPT = [1, 300, 301, 302, 303, 304, 305, 306]


@contextlib.contextmanager
def loaded(path: Path = TINY, model: ModelSettings | None = None, **context: object) -> Iterator[LlamaRunner]:
    settings = ContextSettings(**({"context": 512, "slots": 2, "threads": 1} | context))  # type: ignore[arg-type]
    runner = load_runner(path, model or ModelSettings(), settings)
    try:
        yield runner
    finally:
        runner.close()


def scores(runner: LlamaRunner, tokens: Sequence[int] = PROMPT) -> np.ndarray:
    """Logits after `tokens` in slot 0."""
    runner.keep(0, 0)
    assert runner.decode([Segment(0, tokens, 0, outputs=1)]) is DecodeStatus.OK
    return runner.logits(0).copy()


def adapter(path: Path, scale: float) -> Path:
    """A LoRA adapter for `random_models.llama`: rank 2, on the output matrix of the first attention layer."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0)
    writer.add_tensor("blk.0.attn_output.weight.lora_a", rng.normal(size=(2, 64)).astype(np.float32))
    writer.add_tensor("blk.0.attn_output.weight.lora_b", (scale * rng.normal(size=(64, 2))).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_lora_adapter_changes_the_scores_by_its_scale(tmp_path: Path) -> None:
    model = random_models.llama(tmp_path / "llama.gguf")
    lora = adapter(tmp_path / "lora.gguf", 1.0)
    with loaded(model) as runner:
        plain = scores(runner)
    changes = []
    for scale in ("0", "0.5", "1"):
        with loaded(model, ModelSettings(lora=(f"{lora}:{scale}",))) as runner:
            changes.append(float(np.abs(scores(runner) - plain).max()))
    assert changes[0] == pytest.approx(0, abs=1e-3)
    assert changes[0] < changes[1] < changes[2]
    with loaded(model, ModelSettings(lora=(str(lora),))) as runner:
        assert float(np.abs(scores(runner) - plain).max()) == pytest.approx(changes[2], rel=1e-3)


def test_an_adapter_for_another_model_is_refused(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "lora.gguf", 1.0)
    with pytest.raises(ConfigError, match="lora"), loaded(TINY, ModelSettings(lora=(str(lora),))):
        pass
    with pytest.raises(ConfigError, match="does not exist"), loaded(TINY, ModelSettings(lora=("missing.gguf:2",))):
        pass


def test_metadata_overrides_reach_the_model() -> None:
    with loaded(TINY, ModelSettings(override_kv=("lfm2.context_length=int:300",))) as runner:
        assert runner.info.trained_context == 300
        assert runner.info.slot_context == 300


@pytest.mark.parametrize("override", ["x=int:many", "x=thing:1", "x", "=int:1", "x=bool:yes", "k=str:" + "v" * 128])
def test_a_bad_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="override_kv"), loaded(TINY, ModelSettings(override_kv=(override,))):
        pass


def test_shares_for_more_devices_than_there_can_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_split"), loaded(TINY, ModelSettings(tensor_split=(1.0,) * 1000)):
        pass


def test_rope_settings_change_the_scores(tmp_path: Path) -> None:
    model = random_models.llama(tmp_path / "llama.gguf")
    with loaded(model) as runner:
        plain = scores(runner)
    for options in (
        {"rope_freq_base": 100.0},
        {"rope_freq_scale": 0.25, "rope_scaling": "linear"},
        {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 128},
    ):
        with loaded(model, **options) as runner:
            assert np.abs(scores(runner) - plain).max() > 1e-3, options


def test_a_quantized_cache_works_and_needs_flash_attention() -> None:
    with loaded(cache_type_k="f32", cache_type_v="f32") as runner:
        exact = scores(runner)
    with loaded(flash_attention="on", cache_type_k="q4_0", cache_type_v="q4_0") as runner:
        assert 1e-4 < np.abs(scores(runner) - exact).max() < 10
    with pytest.raises(ConfigError, match="context"), loaded(flash_attention="off", cache_type_v="q4_0"):
        pass


@pytest.mark.parametrize(
    "options",
    [{"mmap": False}, {"mlock": True}, {"check_tensors": True}, {"gpu_layers": 0}, {"tensor_split": (3.0, 1.0)}],
)
def test_ways_to_load_do_not_change_the_scores(options: dict[str, object]) -> None:
    with loaded() as runner:
        plain = scores(runner)
    with loaded(TINY, ModelSettings(**options)) as runner:  # type: ignore[arg-type]
        assert np.array_equal(scores(runner), plain)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slots": 0}, "slots"),
        ({"slots": 256}, "slots"),
        ({"slots": 16, "batch": 16, "ubatch": 16}, "batch: 16 rows"),
        ({"slot_context": 513}, "slot_context: 513"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words), loaded(**options):
        pass


def test_loading_reports_its_progress_and_can_be_given_up() -> None:
    shares: list[float] = []

    def note(share: float) -> bool:
        shares.append(share)
        return True

    load_runner(TINY, ModelSettings(), ContextSettings(context=256, threads=1), on_progress=note).close()
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    with pytest.raises(ConfigError, match="cannot load"):
        load_runner(TINY, ModelSettings(), ContextSettings(context=256, threads=1), on_progress=lambda share: False)


def test_a_batch_that_would_abort_the_process_is_refused_before() -> None:
    with loaded(batch=32, ubatch=32) as runner:
        for rows in (0, 33):
            with pytest.raises(ValueError, match=f"{rows} rows"):
                runner.decode([Segment(0, [5] * rows, 0, outputs=1)])
        assert runner.decode([Segment(0, [5] * 32, 0, outputs=1)]) is DecodeStatus.OK


def test_a_full_cache_changes_nothing() -> None:
    with loaded(context=256) as runner:
        assert runner.decode([Segment(0, [5] * 250, 0, outputs=0)]) is DecodeStatus.OK
        assert runner.decode([Segment(1, [6] * 10, 0, outputs=1)]) is DecodeStatus.NO_ROOM
        assert runner.decode([Segment(0, [5] * 6, 250, outputs=1)]) is DecodeStatus.OK


def test_logits_belong_to_the_segments_that_asked_for_them() -> None:
    with loaded() as runner:
        alone = scores(runner, [1, 400, 401])
        runner.keep(0, 0)
        segments = [
            Segment(1, PROMPT, 0, outputs=0),
            Segment(0, [1, 400, 401], 0, outputs=1),
        ]
        assert runner.decode(segments) is DecodeStatus.OK
        assert runner.logits(0).argmax() == alone.argmax()
        assert np.abs(runner.logits(0) - alone).max() < 0.5


def test_the_penalty_window_is_bounded_by_the_context() -> None:
    with loaded() as runner:
        sampling = Sampling(temperature=0, penalties=Penalties(window=2**31 - 1, repeat=1.5))
        sampler = runner.make_sampler(Request("a", tuple(PROMPT), sampling))
        assert 0 <= sampler.draw(scores(runner)) < runner.info.vocabulary_size
        sampler.close()
        sampler.close()
