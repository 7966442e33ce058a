"""`slotwire snapshots` against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from service.cli import main
from service.server import Server
from slotwire_client import Client
from tests.conftest import serving, settings


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(config=settings(slots=2)) as server, Client(server.address) as client:
        async with client.generate("The module", max_tokens=5, temperature=0, slot_id=0) as generation:
            await generation.complete()
        yield server


async def run(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["snapshots", *arguments])


async def test_they_are_saved_listed_restored_and_deleted(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    there = ("--server", server.address)
    assert await run("save", "a/one", "0", *there) == 0
    assert "a/one: " in capfd.readouterr().out
    assert await run("save", "a/one", "0", *there) == 1
    assert "a/one" in capfd.readouterr().err
    assert await run("save", "a/one", "0", "--force", *there) == 0
    assert await run("list", *there) == 0
    out = capfd.readouterr().out
    assert "Tokens" in out
    assert "a/one" in out
    assert await run("list", "a/", "--json", *there) == 0
    assert json.loads(capfd.readouterr().out)["name"] == "a/one"
    assert await run("restore", "a/one", "--slot", "1", *there) == 0
    assert "slot 1: " in capfd.readouterr().out
    assert await run("delete", "a/one", *there) == 0
    capfd.readouterr()
    assert await run("restore", "a/one", *there) == 1
    assert "a/one" in capfd.readouterr().err


async def test_what_is_wrong_is_one_line(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    assert await run("list") == 2
    assert "--server" in capfd.readouterr().err
    assert await run("save", "../x", "0", "--server", server.address) == 1
    assert "name" in capfd.readouterr().err
    assert await run("save", "x", "7", "--server", server.address) == 1
    assert "slot 7 does not exist" in capfd.readouterr().err
