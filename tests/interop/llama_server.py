"""A real llama-server in a process of its own, and what the tests ask of it.

In our process it would have OpenMP threads beside ours, and take us with it when it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import LIMIT

LOG_BYTES = 3000
"""Of the end of its log, shown with whatever fails."""


@dataclass(frozen=True, slots=True)
class Completion:
    """`reused` and `computed` are tokens of the prompt; `cached` are those in the slot afterwards."""

    tokens: list[int]
    reused: int
    computed: int
    cached: int


class LlamaServer:
    """Talks to one at `address` (host:port), whose slot files are in `folder`."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address, self.folder = address, folder

    async def complete(self, slot: int, prompt: Sequence[int], tokens: int) -> Completion:
        """The greedy text of that many tokens after a prompt, whose beginning is reused where the slot has it."""
        request = {
            "prompt": list(prompt),
            "id_slot": slot,
            "cache_prompt": True,
            "n_predict": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
        }
        answer = await self._post("/completion", request)
        timings = answer["timings"]
        return Completion(answer["tokens"], timings["cache_n"], timings["prompt_n"], answer["tokens_cached"])

    async def save(self, slot: int, name: str) -> tuple[int, int]:
        """The tokens and bytes that it says it wrote into a file."""
        answer = await self._post(f"/slots/{slot}?action=save", {"filename": name})
        return answer["n_saved"], answer["n_written"]

    async def restore(self, slot: int, name: str) -> tuple[int, int]:
        """The tokens and bytes that it says it read."""
        answer = await self._post(f"/slots/{slot}?action=restore", {"filename": name})
        return answer["n_restored"], answer["n_read"]

    async def _post(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(self._send, path, json.dumps(request).encode())

    def _send(self, path: str, body: bytes) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._address, timeout=LIMIT)
        with contextlib.closing(connection):
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                answer = response.read().decode()
        assert response.status == 200, f"{path}: {response.status} {answer}"
        decoded: dict[str, Any] = json.loads(answer)
        return decoded


@contextlib.asynccontextmanager
async def llama_server(model: Path, folder: Path, options: Sequence[str] = ()) -> AsyncIterator[LlamaServer]:
    """One that has loaded `model`, with the options of peer.py; its log is added to whatever fails."""
    arguments = (str(Path(__file__).with_name("peer.py")), str(model), str(folder), *options)
    log = folder / "llama-server.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors
        )
    try:
        yield LlamaServer(await _address(process), folder)
        assert process.returncode is None, "it ended by itself"
        async with asyncio.timeout(LIMIT):
            await process.communicate(b"")  # the end of its input ends it
        assert process.returncode == 0
    except BaseException as error:
        error.add_note(log.read_bytes()[-LOG_BYTES:].decode(errors="replace"))
        raise
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    """What its first line says: http://host:port."""
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT):
        line = (await process.stdout.readline()).decode().strip()
    assert line.startswith("http://"), f"it did not start: {line!r}"
    return line.removeprefix("http://")
