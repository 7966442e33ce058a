"""The runner: a model and its context as the engine wants them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import llama_cpp

from service.engine.batch import Sampler
from service.engine.llama import library
from service.engine.llama.context import Context, Drafting
from service.engine.llama.decoder import ContextDecoder
from service.engine.llama.draft import DraftRunner, load_draft
from service.engine.llama.model import Model, OnProgress
from service.engine.llama.samplers import ChainSampler, GreedySampler
from service.engine.llama.vocabulary import Vocabulary
from service.engine.settings import ContextSettings, ModelSettings, SpeculationSettings
from service.engine.types import Capabilities, ModelInfo, Request, Rollback
from service.errors import ConfigError


class LlamaRunner(ContextDecoder):
    """Implements `engine.batch.Runner`. Made, used and closed on one thread: the first and only one that computes.

    A second thread with its own OpenMP team would slow each decode down for good. That is why the draft model, where
    there is one, is computed on the same thread, too.
    """

    def __init__(self, model: Model, context: Context, settings: ContextSettings, draft: DraftRunner | None) -> None:
        super().__init__(model, context)
        self.draft = draft
        self.vocabulary = Vocabulary(model.vocab_handle)
        self.end_tokens = self.vocabulary.end_tokens
        self.pieces = self.vocabulary.pieces
        self.info = _info(model, context, settings, self.vocabulary.size)

    def make_sampler(self, request: Request) -> Sampler:
        """The sampler of a request; may be called from any thread. Raises InvalidRequest for a bad grammar."""
        if request.sampling.greedy:
            return GreedySampler(self.end_tokens if request.sampling.ignore_eos else ())
        return ChainSampler(
            self.vocabulary, self._model.vocab_handle, request.sampling, request.tokens, self.info.slot_context
        )

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()
        super().close()


def load_runner(
    path: Path,
    model_settings: ModelSettings,
    settings: ContextSettings,
    speculation: SpeculationSettings = SpeculationSettings(draft="none"),  # noqa: B008
    on_progress: OnProgress | None = None,
) -> LlamaRunner:
    """Load the models and make their contexts, on the calling thread. Raises ConfigError with llama.cpp's reason."""
    library.route_log()
    drafting = Drafting(speculation.rows, speculation.rollback, speculation.snapshot_memory)
    with contextlib.ExitStack() as undo:
        model = Model(path, model_settings, on_progress)
        undo.callback(model.close)
        context = Context(model, settings, drafting)
        undo.callback(context.close)
        draft = None
        if speculation.model is not None:
            draft = load_draft(speculation.model, model, context.size, model_settings, settings, speculation)
            undo.callback(draft.close)
        runner = LlamaRunner(model, context, settings, draft)
        undo.pop_all()
        return runner


def _info(model: Model, context: Context, settings: ContextSettings, vocabulary: int) -> ModelInfo:
    trained: int = llama_cpp.llama_model_n_ctx_train(model.handle)
    slot_context = settings.slot_context or min(context.size, trained or context.size)
    if not 2 <= slot_context <= context.size:
        raise ConfigError(f"slot_context: {slot_context} is not in [2, {context.size}], the context of all slots")
    window: int = llama_cpp.llama_model_n_swa(model.handle)
    return ModelInfo(
        name=model.path.name,
        description=model.description,
        architecture=model.metadata("general.architecture"),
        parameters=llama_cpp.llama_model_n_params(model.handle),
        size_bytes=llama_cpp.llama_model_size(model.handle),
        vocabulary_size=vocabulary,
        embedding_size=llama_cpp.llama_model_n_embd(model.handle),
        layers=llama_cpp.llama_model_n_layer(model.handle),
        trained_context=trained,
        context=context.size,
        slot_context=slot_context,
        slots=settings.slots,
        capabilities=Capabilities(
            trim=context.rollback is Rollback.TRIM,
            recurrent=bool(llama_cpp.llama_model_is_recurrent(model.handle)),
            hybrid=bool(llama_cpp.llama_model_is_hybrid(model.handle)),
            sliding_window=window,
            rollback=context.rollback,
            context_checkpoints=settings.context_checkpoints > 0
            and (context.rollback is not Rollback.TRIM or window > 0),
            deterministic=context.deterministic,
        ),
        chat_template=model.chat_template,
    )
