"""The composition root: a backend, its services on a port, and their life from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from service.backend import Backend
from service.config import Settings, model_file
from service.engine.types import ModelInfo
from service.errors import ConfigError
from service.identity import Identity
from service.rpc import paused
from service.rpc.generation import GenerationServicer
from service.rpc.interceptor import Boundary
from service.rpc.slot import SlotServicer
from service.rpc.snapshot import SnapshotServicer
from service.rpc.states import StateStreams
from service.rpc.system import SystemServicer
from service.slot_images import SlotImages
from service.snapshots import Snapshots
from service.state.location import StoreOptions
from service.state.room import StoreLimits
from service.state.uploads import Uploads
from slotwire.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    slot_pb2,
    slot_pb2_grpc,
    snapshot_pb2,
    snapshot_pb2_grpc,
    system_pb2,
    system_pb2_grpc,
)

log = logging.getLogger("slotwire.server")

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_MODEL_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    slot_pb2.DESCRIPTOR.services_by_name["SlotService"].full_name,
    snapshot_pb2.DESCRIPTOR.services_by_name["SnapshotService"].full_name,
)
_SYSTEM_SERVICE = system_pb2.DESCRIPTOR.services_by_name["SystemService"].full_name

_SWEEP_SECONDS = 5.0
GRACE_SECONDS = 10.0  # for running requests, once a stop was asked for


class Server:
    """Listens from `start` on; serves requests from `load` on. Use it as an async context manager, or call `stop`."""

    def __init__(self, model: Path, settings: Settings) -> None:
        self._settings = settings
        self.backend = Backend(model, settings.model, settings.context, settings.scheduling, settings.speculation)
        self._identity = Identity(
            self.backend, model, settings.model, settings.context, settings.speculation, settings.state.cache
        )
        images = SlotImages(self.backend, self._identity, paused.encode, paused.decode)
        self._uploads = Uploads(
            max_uploads=settings.state.uploads,
            max_bytes=settings.state.upload_bytes,
            time_to_live=settings.state.upload_seconds,
            reader=images.reader,
        )
        self._snapshots = Snapshots(
            images,
            self._uploads,
            settings.state.place,
            StoreOptions(endpoint=settings.state.store_endpoint),
            StoreLimits(
                snapshot_bytes=settings.state.snapshot_bytes,
                total_bytes=settings.state.store_bytes,
                snapshots=settings.state.store_snapshots,
            ),
        )
        self._streams = StateStreams(images, self._uploads, settings.scheduling.outbox_seconds)
        self._sweeper: asyncio.Task[None] | None = None
        self.address = ""
        """Where it listens, with the port that was bound."""
        limit = settings.server.max_message_bytes
        self._server = grpc.aio.server(interceptors=[Boundary(limit)], options=_options(limit))
        self._health = health.aio.HealthServicer()
        self._add_services()

    def _add_services(self) -> None:
        server, backend = self._server, self.backend
        generation = GenerationServicer(backend, self._settings.scheduling.outbox_seconds)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        slot_pb2_grpc.add_SlotServiceServicer_to_server(SlotServicer(backend, self._streams), server)
        snapshot_pb2_grpc.add_SnapshotServiceServicer_to_server(SnapshotServicer(self._snapshots), server)
        system_pb2_grpc.add_SystemServiceServicer_to_server(SystemServicer(backend), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*_MODEL_SERVICES, _SYSTEM_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    async def start(self) -> str:
        """Listen; returns the address. Raises ConfigError where that is not possible."""
        listen = self._settings.server.listen
        for name in ("", *_MODEL_SERVICES):
            await self._health.set(name, _NOT_SERVING)
        await self._health.set(_SYSTEM_SERVICE, _SERVING)
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise ConfigError(f"listen: cannot listen on {listen}: {error}", reason="CANNOT_LISTEN") from None
        await self._server.start()
        self.address = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
        return self.address

    async def load(self) -> ModelInfo:
        """Load the model and turn health to SERVING. Raises ConfigError where it cannot be used; then every request
        is refused with that reason, for as long as the server runs.
        """
        info = await self.backend.load()
        self._identity.start()
        self._sweeper = asyncio.create_task(self._sweep())
        for name in ("", *_MODEL_SERVICES):
            await self._health.set(name, _SERVING)
        return info

    async def stop(self, grace: float) -> None:
        """Refuse new requests, let running ones end within `grace` seconds, then end the rest and free the model."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._identity.close()
        self._streams.close()
        await self._snapshots.close()
        await self.backend.close()

    async def _sweep(self) -> None:
        """Forget uploads whose time is over."""
        while True:
            self._uploads.expire()
            await asyncio.sleep(_SWEEP_SECONDS)

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(0)


def _options(limit: int) -> list[tuple[str, int]]:
    """Channel arguments. gRPC's own size limit is higher than ours, whose refusal explains itself."""
    return [
        ("grpc.max_receive_message_length", 4 * limit),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a port that is taken is an error
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def run(settings: Settings) -> int:
    """`slotwire serve`: run until a signal; returns the exit status. Raises ConfigError for settings that are wrong."""
    logging.basicConfig(
        level=settings.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return _run(_serve(model_file(settings.model), settings))


def _run(main: Coroutine[Any, Any, int]) -> int:
    """uvloop takes a few percent off what a message costs; where there is none, asyncio's own loop does."""
    if sys.platform == "win32":
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)


async def _serve(model: Path, settings: Settings) -> int:
    server = Server(model, settings)
    stopping = asyncio.Event()
    _on_signals(stopping)
    try:
        address = await server.start()
        began = time.monotonic()
        loading = asyncio.create_task(_load(server))
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
        if not stopping.is_set():
            info = loading.result()
            if settings.server.ready_file is not None:
                settings.server.ready_file.write_text(address)
            _say(_ready_line(address, info, time.monotonic() - began))
            await stop
            _say("stopping: running requests may end, a second signal stops at once")
        loading.cancel()
        stop.cancel()
    finally:
        await server.stop(GRACE_SECONDS)
    return 0


async def _load(server: Server) -> ModelInfo:
    """Load, and show how far it is on a terminal."""
    loading = asyncio.create_task(server.load())
    show = sys.stderr.isatty()
    while show and not loading.done():
        _say(f"\rloading {server.backend.load_progress:4.0%}", end="")
        await asyncio.wait((loading,), timeout=0.1)
    if show:
        _say("\r\x1b[K", end="")
    return await loading


def _on_signals(stopping: asyncio.Event) -> None:
    """The first SIGINT or SIGTERM stops in order; the second at once, with the signal's own effect."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def first() -> None:
        stopping.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, first)


def _ready_line(address: str, info: ModelInfo, seconds: float) -> str:
    return (
        f"slotwire is ready on {address}: {info.name} ({info.description}), {info.slots} slots, "
        f"{info.context:,} tokens of context ({info.slot_context:,} a slot), "
        f"{psutil.Process().memory_info().rss / 2**20:,.0f} MiB of memory, loaded in {seconds:.1f} s"
    )


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
