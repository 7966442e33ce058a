"""The draft model with a context of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import llama_cpp

from service.engine.batch import Logits
from service.engine.llama.context import Context
from service.engine.llama.decoder import ContextDecoder
from service.engine.llama.model import Model
from service.engine.settings import ContextSettings, ModelSettings, SpeculationSettings
from service.errors import ConfigError

_UNUSED = llama_cpp.LLAMA_TOKEN_ATTR_UNUSED


class DraftRunner(ContextDecoder):
    """A draft model; it scores the first `vocabulary` tokens alone."""

    def __init__(self, model: Model, context: Context, vocabulary: int) -> None:
        super().__init__(model, context)
        self._vocabulary = vocabulary

    def logits(self, index: int) -> Logits:
        return super().logits(index)[: self._vocabulary]


def load_draft(
    path: Path,
    target: Model,
    target_context: int,
    model_settings: ModelSettings,
    context_settings: ContextSettings,
    settings: SpeculationSettings,
) -> DraftRunner:
    """Load a draft model beside its `target`, whose context has `target_context` tokens. Raises ConfigError where it
    cannot be used, or does not share the target's vocabulary.
    """
    placed = replace(model_settings, gpu_layers=settings.draft_gpu_layers, lora=(), override_kv=())
    model = Model(path, placed, field="draft_model")
    try:
        size = _common_vocabulary(target, model)
        context = Context(
            model,
            replace(
                context_settings,
                context=settings.draft_context or target_context,
                cache_type_k=settings.draft_cache_type_k,
                cache_type_v=settings.draft_cache_type_v,
                deterministic=False,  # a draft changes the speed, never the text
            ),
        )
    except BaseException:
        model.close()
        raise
    return DraftRunner(model, context, size)


def _common_vocabulary(target: Model, draft: Model) -> int:
    """The size of the target's vocabulary, if the draft's has the same tokens. Either may have unused ones more.

    Raises ConfigError that names the first token that differs.
    """
    ours, theirs = target.vocab_handle, draft.vocab_handle
    sizes = [llama_cpp.llama_vocab_n_tokens(vocabulary) for vocabulary in (ours, theirs)]
    for token in range(min(sizes)):
        texts = [llama_cpp.llama_vocab_get_text(vocabulary, token) for vocabulary in (ours, theirs)]
        ends = [llama_cpp.llama_vocab_is_eog(vocabulary, token) for vocabulary in (ours, theirs)]
        if texts[0] != texts[1]:
            raise _differs(f"token {token} is {_shown(texts[0])} in the model and {_shown(texts[1])} in the draft")
        if ends[0] != ends[1]:
            raise _differs(f"token {token}, {_shown(texts[0])}, ends a text in only one of the two")
    longer = ours if sizes[0] > sizes[1] else theirs
    for token in range(min(sizes), max(sizes)):
        if not llama_cpp.llama_vocab_get_attr(longer, token) & _UNUSED:
            raise _differs(f"the model has {sizes[0]} tokens and the draft {sizes[1]}")
    return int(min(sizes))


def _differs(what: str) -> ConfigError:
    return ConfigError(f"draft_model: its vocabulary is another one: {what}", reason="VOCABULARY_MISMATCH")


def _shown(text: bytes | None) -> str:
    return repr((text or b"").decode("utf-8", "replace"))
