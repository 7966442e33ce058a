"""The engine's thread, and the face it shows to the event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Generic, TypeVar

from service.engine.batch import Runner, Sampler
from service.engine.core import Core, Outcome
from service.engine.outbox import Outbox
from service.engine.sequence import Sequence
from service.engine.settings import SchedulingSettings, SpeculationSettings
from service.engine.types import Finished, Request
from service.errors import EngineFailure, SlotwireError, Unavailable

log = logging.getLogger("slotwire.engine")

T = TypeVar("T")
R = TypeVar("R", bound=Runner)

_Command = Callable[[Core], None]


class Engine(Generic[R]):
    """Runs a `Core` on its own thread. All methods are for the event loop that called `start`.

    Requests and commands go to the thread through one queue, which it empties between steps. What a step produced
    comes back in one wake-up of the loop, however many requests it was for.
    """

    def __init__(
        self, load: Callable[[], R], settings: SchedulingSettings, speculation: SpeculationSettings | None = None
    ) -> None:
        self._load = load
        self._settings, self._speculation = settings, speculation
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._outboxes: dict[str, Outbox] = {}
        self._thread = threading.Thread(target=self._main, name="slotwire-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._loaded: asyncio.Future[R]
        self._closing = False
        self._idle = True

    async def start(self) -> R:
        """Load the model on the engine's thread. Raises ConfigError where that fails."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._thread.start()
        return await asyncio.shield(self._loaded)

    def submit(
        self, request: Request, sampler: Sampler, generated: Tokens[int] = (), pieces: Tokens[bytes] = ()
    ) -> Outbox:
        """Hand a request over, together with its sampler; with the tokens that it has `generated` elsewhere it goes on
        behind them. A refusal comes through the outbox, like all else.
        """
        if self._closing:
            sampler.close()
            raise Unavailable("the server is shutting down", reason="SHUTTING_DOWN")
        outbox = self._outboxes[request.id] = Outbox(self._settings.outbox_tokens)
        sequence = Sequence(request, sampler, generated, pieces)
        self._commands.put(lambda core: core.submit(sequence))
        return outbox

    def cancel(self, request_id: str) -> None:
        """Take a request out of the batch before the next step. Nothing happens where it is over already."""
        if self._outboxes.pop(request_id, None) is not None:
            self._commands.put(lambda core: core.cancel(request_id))

    @property
    def open_requests(self) -> int:
        """Requests that were neither ended nor cancelled yet."""
        return len(self._outboxes)

    async def call(self, command: Callable[[Core], T]) -> T:
        """Run `command` on the engine's thread between two steps; returns or raises what it does."""
        if self._closing:
            raise Unavailable("the server is shutting down", reason="SHUTTING_DOWN")
        future: asyncio.Future[T] = self._loop.create_future()

        def run(core: Core) -> None:
            try:
                result = command(core)
            except Exception as error:
                self._loop.call_soon_threadsafe(_set_exception, future, error)
            else:
                self._loop.call_soon_threadsafe(_set_result, future, result)

        self._commands.put(run)
        return await future

    async def close(self) -> None:
        """End all requests with Unavailable, free the model, and wait for the thread."""
        if self._closing:
            return
        self._closing = True
        error = Unavailable("the server is shutting down", reason="SHUTTING_DOWN")
        self._commands.put(lambda core: core.fail_all(error))
        self._commands.put(None)
        if self._thread.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    # on the engine's thread

    def _main(self) -> None:
        try:
            runner = self._load()
        except BaseException as error:
            self._loop.call_soon_threadsafe(_set_exception, self._loaded, error)
            return
        core = Core(runner, self._settings, self._speculation)
        core.calibrate()
        self._loop.call_soon_threadsafe(_set_result, self._loaded, runner)
        try:
            while self._obey(core):
                self._step(core)
            self._flush(core)
        finally:
            runner.close()

    def _obey(self, core: Core) -> bool:
        """Run the commands that are there; wait for one where the engine is idle. Returns False to stop."""
        while True:
            try:
                command = self._commands.get(block=self._idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._idle = False
            command(core)

    def _step(self, core: Core) -> None:
        try:
            self._idle = not core.step()
        except Exception:
            incident = uuid.uuid4().hex[:12]
            log.exception("step failed: incident %s, all requests end", incident)
            core.fail_all(EngineFailure(f"the engine failed; incident {incident}", incident=incident))
        self._flush(core)

    def _flush(self, core: Core) -> None:
        outcomes = core.take_outcomes()
        if outcomes:
            self._loop.call_soon_threadsafe(self._deliver, outcomes)

    # on the event loop

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for request_id, event in outcomes:
            outbox = self._outboxes.get(request_id)
            if outbox is None:  # cancelled meanwhile
                continue
            if not outbox.put(event):
                self.cancel(request_id)
            elif isinstance(event, (Finished, SlotwireError)):
                del self._outboxes[request_id]


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
