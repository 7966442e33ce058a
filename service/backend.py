"""One loaded model behind its engine, with what prepares requests for it. Knows nothing of gRPC."""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from service.engine.batch import Sampler
from service.engine.chat import ChatTemplate
from service.engine.core import Core
from service.engine.intake import Draft, Intake
from service.engine.llama import LlamaRunner, load_runner
from service.engine.loop import Engine
from service.engine.outbox import Outbox
from service.engine.settings import ContextSettings, ModelSettings, SchedulingSettings, SpeculationSettings
from service.engine.types import Load, ModelInfo, Request, SlotInfo
from service.errors import ConfigError, NotFound, Unavailable

log = logging.getLogger("slotwire.backend")

_RETRY_AFTER = 1.0  # seconds, while loading


class BackendState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What exists once the model is there."""

    runner: LlamaRunner
    intake: Intake

    @property
    def info(self) -> ModelInfo:
        return self.runner.info


class Backend:
    """Loads a model, takes requests for it, and says how it is. For one event loop."""

    def __init__(
        self,
        path: Path,
        model: ModelSettings,
        context: ContextSettings,
        scheduling: SchedulingSettings,
        speculation: SpeculationSettings,
    ) -> None:
        self.started_at = time.time()
        self.state = BackendState.LOADING
        self.load_progress = 0.0
        self.speculation = speculation
        self._grammars = scheduling.grammars
        self._engine = Engine(
            lambda: load_runner(path, model, context, speculation, self._on_progress), scheduling, speculation
        )
        self._intake_thread = concurrent.futures.ThreadPoolExecutor(1, "slotwire-intake")
        self._loaded: Loaded | None = None
        self._failure: ConfigError | None = None

    async def load(self) -> ModelInfo:
        """Load the model. Raises ConfigError where it cannot be used; the backend then refuses all requests."""
        began = time.monotonic()
        try:
            runner = await self._engine.start()
            intake = Intake(runner.info, runner.vocabulary, _template(runner), runner.make_sampler, self._grammars)
        except ConfigError as error:
            self.state, self._failure = BackendState.FAILED, error
            raise
        self._loaded = Loaded(runner, intake)
        self.state, self.load_progress = BackendState.READY, 1.0
        log.info("loaded %s: %.1f s", runner.info.name, time.monotonic() - began)
        return runner.info

    @property
    def loaded(self) -> Loaded:
        """The model. Raises Unavailable while it is loading, and the reason where it could not be loaded."""
        if self._failure is not None:
            raise self._failure
        if self._loaded is None:
            raise Unavailable(
                f"the model is loading, {self.load_progress:.0%} done", retry_after=_RETRY_AFTER, reason="LOADING"
            )
        return self._loaded

    async def submit(self, draft: Draft) -> tuple[Request, Outbox]:
        """Prepare a request and queue it. `cancel` must follow, whatever happens to it.

        Raises InvalidRequest, NotFound (slot), Conflict (no chat template) or Unavailable.
        """
        loaded = self.loaded
        if draft.request.slot_id is not None:
            self.check_slot(draft.request.slot_id)
        preparing = self._intake_thread.submit(loaded.intake.prepare, draft)
        try:
            request, sampler = await asyncio.wrap_future(preparing)
        except asyncio.CancelledError:
            preparing.add_done_callback(_discard)
            raise
        return request, self._engine.submit(request, sampler)

    def cancel(self, request_id: str) -> None:
        """Take a request out of the batch before the next step; harmless where it has ended."""
        self._engine.cancel(request_id)

    @property
    def open_requests(self) -> int:
        """Requests whose streams have not ended yet, whether they run or wait."""
        return self._engine.open_requests

    def check_slot(self, slot_id: int) -> None:
        """Raise NotFound unless there is such a slot."""
        slots = self.loaded.info.slots
        if slot_id >= slots:
            raise NotFound(f"slot {slot_id} does not exist; there are {slots}, from 0", reason="NO_SUCH_SLOT")

    async def slots(self) -> list[SlotInfo]:
        self.loaded  # noqa: B018  # raises while there is none
        return await self._engine.call(Core.slots)

    async def erase(self, slot_id: int) -> int:
        """Empty an idle slot; returns how many tokens it held. Raises NotFound or Conflict."""
        self.check_slot(slot_id)
        return await self._engine.call(lambda core: core.erase(slot_id))

    async def load_now(self) -> Load:
        self.loaded  # noqa: B018  # raises while there is none
        return await self._engine.call(Core.load)

    async def close(self) -> None:
        self.state = BackendState.DRAINING
        await self._engine.close()
        self._intake_thread.shutdown()

    def _on_progress(self, share: float) -> bool:
        """Called on the engine's thread while it loads; giving up here is what makes `close` quick."""
        self.load_progress = share
        return self.state is BackendState.LOADING


def _template(runner: LlamaRunner) -> ChatTemplate | None:
    """The model's chat template. One that does not compile costs the model its chat, not its service."""
    source = runner.info.chat_template
    if source is None:
        return None
    vocabulary = runner.vocabulary
    try:
        return ChatTemplate(source, bos=vocabulary.bos, eos=vocabulary.eos, control_tokens=vocabulary.control_texts)
    except ConfigError as error:
        log.warning("ignore the model's chat template: %s", error)
        return None


def _discard(preparing: concurrent.futures.Future[tuple[Request, Sampler]]) -> None:
    """Free the sampler of a request that nobody waits for any more."""
    if not preparing.cancelled() and preparing.exception() is None:
        preparing.result()[1].close()
