"""One loaded model behind its engine, with what prepares requests for it. Knows nothing of gRPC."""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
import logging
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from service.engine.batch import Sampler
from service.engine.chat import ChatTemplate
from service.engine.core import Core
from service.engine.intake import Draft, Intake, TokenPrompt
from service.engine.llama import STATE_VERSION, LlamaRunner, load_runner
from service.engine.loop import Engine
from service.engine.outbox import Outbox
from service.engine.settings import ContextSettings, ModelSettings, SchedulingSettings, SpeculationSettings
from service.engine.types import (
    Finished,
    FinishReason,
    Load,
    ModelInfo,
    Request,
    Sampling,
    SlotContents,
    SlotInfo,
    SlotState,
    Started,
)
from service.errors import ConfigError, Conflict, NotFound, Unavailable
from service.state.layout import BLOB_PREFIX
from service.state.memory import PayloadSummary
from service.state.payload import parse_payload

log = logging.getLogger("slotwire.backend")

_GROWTH_BYTES = 256 << 10
_PAGE_BYTES = 4096
_RETRY_AFTER = 1.0  # seconds, while loading


class BackendState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Samples:
    """How the states of the target and of the draft model are made up."""

    target: PayloadSummary
    draft: PayloadSummary | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What exists once the model is there."""

    runner: LlamaRunner
    intake: Intake
    samples: Samples
    state_version: int = STATE_VERSION

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
            samples = _samples(*await self._engine.call(Core.samples))
        except ConfigError as error:
            self.state, self._failure = BackendState.FAILED, error
            raise
        self._loaded = Loaded(runner, intake, samples)
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

    async def resume(self, asked: Request) -> tuple[Request, Outbox]:
        """Go on with the generation that was restored with the slot of `asked`, which says who asks and for how long.
        `cancel` must follow. Raises NotFound (slot), Conflict (nothing to resume, slot busy) or Unavailable.
        """
        loaded, slot_id = self.loaded, asked.slot_id
        assert slot_id is not None
        self.check_slot(slot_id)
        paused = await self._engine.call(lambda core: core.paused(slot_id))
        request = replace(
            asked, tokens=paused.request.tokens, sampling=paused.request.sampling, max_tokens=paused.request.max_tokens,
            stop=paused.request.stop, logprobs=paused.request.logprobs, draft=paused.request.draft,
            session=paused.request.session, cache_key=paused.request.cache_key,
        )  # fmt: skip
        preparing = self._intake_thread.submit(loaded.intake.resume, replace(paused, request=request))
        try:
            request, sampler = await asyncio.wrap_future(preparing)
        except asyncio.CancelledError:
            preparing.add_done_callback(_discard)
            raise
        return request, self._engine.submit(request, sampler, paused.generated, loaded.runner.pieces)

    async def prefill(
        self, tokens: tuple[int, ...], *, slot_id: int | None, session: str | None, cache_key: str
    ) -> tuple[int, FinishReason]:
        """Compute tokens into a slot; returns which one, and why that ended. Raises what a request can."""
        request = Request(
            uuid.uuid4().hex, (), Sampling(temperature=0), max_tokens=0, slot_id=slot_id, session=session,
            cache_key=cache_key, arrived=time.monotonic(),
        )  # fmt: skip
        chosen = -1
        try:
            _, outbox = await self.submit(Draft(request, TokenPrompt(tokens)))
            while True:
                event = await outbox.get()
                if isinstance(event, Started):
                    chosen = event.slot_id
                if isinstance(event, Finished):
                    return chosen, event.reason
        finally:
            self.cancel(request.id)

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

    async def contents(self, slot_id: int, *, with_draft: bool) -> SlotContents:
        """What a slot holds, busy or not. The memory for it is taken before, since others wait while it is filled."""
        target, draft = await self._engine.call(lambda core: core.state_sizes(slot_id))
        rooms = await asyncio.to_thread(lambda: (_room(target), _room(draft) if with_draft else None))
        return await self._engine.call(lambda core: core.contents(slot_id, with_draft=with_draft, rooms=rooms))

    async def put(self, slot_id: int | None, contents: SlotContents) -> tuple[int, bool]:
        """Replace what an idle slot holds; see `Core.put`."""
        return await self._engine.call(lambda core: core.put(slot_id, contents))

    async def check_idle(self, slot_id: int) -> None:
        """Raise NotFound unless there is such a slot, and Conflict where it is busy."""
        self.check_slot(slot_id)
        if (await self.slots())[slot_id].state is not SlotState.IDLE:
            raise Conflict(f"slot {slot_id} is busy", reason="SLOT_BUSY", slot=slot_id)

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


def _room(size: int) -> memoryview:
    """Memory for a state of `size` bytes, and for one that grows a little meanwhile. Its pages are there already."""
    room = np.empty(size + size // 16 + _GROWTH_BYTES, np.uint8)
    room[::_PAGE_BYTES] = 0
    return room.data


def _samples(target: memoryview, draft: memoryview | None) -> Samples:
    def summary(state: memoryview) -> PayloadSummary:
        return parse_payload(state[BLOB_PREFIX:], version=STATE_VERSION)

    return Samples(summary(target), summary(draft) if draft is not None else None)


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
