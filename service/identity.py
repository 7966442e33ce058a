"""What the state of this backend fits: its fingerprints, for which the weights are read in the background."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

from service.backend import Backend
from service.engine.settings import ContextSettings, ModelSettings, SpeculationSettings
from service.errors import Unavailable
from service.state.fingerprint import Fingerprint, Lora, Rope, vocabulary_digest
from service.state.memory import CacheKind, PayloadSummary
from service.state.weights import HashingCancelled, weights_digest

log = logging.getLogger("slotwire.state")


class Identity:
    """Fingerprints of a backend's models. `cache` is a directory that remembers the digests of their files."""

    def __init__(
        self,
        backend: Backend,
        path: Path,
        model: ModelSettings,
        context: ContextSettings,
        speculation: SpeculationSettings,
        cache: Path | None,
    ) -> None:
        self._backend, self._path, self._model, self._context = backend, path, model, context
        self._speculation, self._cache = speculation, cache
        self._cancelled = threading.Event()
        self._target: asyncio.Task[Fingerprint] | None = None
        self._draft: asyncio.Task[Fingerprint] | None = None

    def start(self) -> None:
        """Begin to read the files, once the model is loaded."""
        self._target = asyncio.create_task(asyncio.to_thread(self._make_target))
        if self._speculation.model is not None:
            self._draft = asyncio.create_task(asyncio.to_thread(self._make_draft, self._speculation.model))

    async def close(self) -> None:
        """Give up what is not read yet."""
        self._cancelled.set()
        tasks = [task for task in (self._target, self._draft) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def target(self) -> Fingerprint:
        """Raises Unavailable where a file could not be read."""
        return await self._result(self._target)

    async def draft(self) -> Fingerprint | None:
        """None without a draft model. Raises Unavailable where its file could not be read."""
        return await self._result(self._draft) if self._speculation.model is not None else None

    async def _result(self, task: asyncio.Task[Fingerprint] | None) -> Fingerprint:
        self._backend.loaded  # noqa: B018  # raises while there is none
        assert task is not None
        try:
            return await asyncio.shield(task)
        except (OSError, HashingCancelled) as error:
            raise Unavailable(f"the model's file could not be read: {error}", reason="FINGERPRINT_FAILED") from None

    def _make_target(self) -> Fingerprint:
        loaded, context = self._backend.loaded, self._context
        loras = []
        for spec in self._model.lora:
            file, _, scale = spec.rpartition(":")
            known = Path(file).is_file()
            loras.append(Lora(self._digest(Path(file if known else spec)), float(scale) if known else 1.0))
        return Fingerprint(
            architecture=loaded.info.architecture,
            weights=self._digest(self._path),
            vocabulary=vocabulary_digest(loaded.runner.vocabulary.entries()),
            cache_type_k=context.cache_type_k,
            cache_type_v=context.cache_type_v,
            flash_attention=_flash_attention(loaded.samples.target),
            state_version=loaded.state_version,
            loras=tuple(loras),
            rope=_rope(context),
        )

    def _make_draft(self, path: Path) -> Fingerprint:
        loaded, speculation = self._backend.loaded, self._speculation
        assert loaded.samples.draft is not None
        return Fingerprint(
            architecture="draft",
            weights=self._digest(path),
            vocabulary=vocabulary_digest(loaded.runner.vocabulary.entries()),
            cache_type_k=speculation.draft_cache_type_k,
            cache_type_v=speculation.draft_cache_type_v,
            flash_attention=_flash_attention(loaded.samples.draft),
            state_version=loaded.state_version,
            rope=_rope(self._context),
        )

    def _digest(self, path: Path) -> str:
        return weights_digest(path, cache=self._cache, cancelled=self._cancelled.is_set)


def _flash_attention(sample: PayloadSummary) -> bool:
    """Values are kept transposed where it is off."""
    attention = [cache for cache in sample.caches if cache.kind is CacheKind.ATTENTION]
    return bool(attention) and not attention[0].transposed


def _rope(context: ContextSettings) -> Rope:
    return Rope(
        scaling=None if context.rope_scaling == "model" else context.rope_scaling,
        frequency_base=context.rope_freq_base or None,
        frequency_scale=context.rope_freq_scale or None,
        yarn_extension_factor=context.yarn_ext_factor if context.yarn_ext_factor >= 0 else None,
        yarn_attention_factor=context.yarn_attn_factor if context.yarn_attn_factor >= 0 else None,
        yarn_beta_fast=context.yarn_beta_fast if context.yarn_beta_fast >= 0 else None,
        yarn_beta_slow=context.yarn_beta_slow if context.yarn_beta_slow >= 0 else None,
        yarn_original_context=context.yarn_orig_ctx or None,
    )
