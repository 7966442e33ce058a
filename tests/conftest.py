"""What tests share: the tiny models, and real servers on them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from service.config import ServerSettings, Settings, StateSettings
from service.engine.settings import ContextSettings, ModelSettings, SchedulingSettings, SpeculationSettings
from service.server import Server

MODELS = Path(__file__).parent / "models"
TINY = MODELS / "tiny-hybrid.Q8_0.gguf"
"""An LFM2 (short convolutions and attention) of 3.8 million parameters, trained on the Python documentation."""

DIGESTS = Path(tempfile.gettempdir()) / "slotwire-tests"
"""Remembers the digests of the tiny models between runs, as a server does."""

LIMIT = 30.0
"""Seconds that anything may take in a test; what is waited for takes a small part of that."""


def settings(
    *,
    max_message_bytes: int = 16 << 20,
    scheduling: SchedulingSettings | None = None,
    speculation: SpeculationSettings | None = None,
    state: StateSettings | None = None,
    **context: object,
) -> Settings:
    """Settings of a server on a free port; `context` are fields of ContextSettings."""
    return Settings(
        server=ServerSettings(listen="127.0.0.1:0", max_message_bytes=max_message_bytes),
        model=ModelSettings(),
        context=ContextSettings(**({"context": 2048, "threads": 1} | context)),  # type: ignore[arg-type]
        scheduling=scheduling or SchedulingSettings(),
        speculation=speculation or SpeculationSettings(),
        state=state or StateSettings(digest_cache=DIGESTS, store="memory:"),
    )


@contextlib.asynccontextmanager
async def serving(model: Path = TINY, config: Settings | None = None) -> AsyncIterator[Server]:
    """A real server in this process, with its model loaded."""
    async with Server(model, config or settings()) as server:
        await server.load()
        yield server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel
