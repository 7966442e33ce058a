"""Where the client commands get their server: one that is named, or a private one that lives as long as they do."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

from cyclopts import Group, Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from service.cli.failure import Failure
from service.config import ENV_PREFIX
from slotwire_client import Client, ServerState, Unavailable

_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 10.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Connection:
    """Which server to use.

    Attributes:
        server: Address of a running server (HOST:PORT or unix:/PATH). Left out: a private one, only for this command.
        model: GGUF file for the private server. Left out: the embedded default model.
    """

    server: Annotated[str | None, Parameter(env_var=ENV_PREFIX + "SERVER")] = None
    model: Path | None = None


ConnectionOptions = Annotated[Connection, Parameter(name="*", group=Group("Connection", sort_key=9))]

PRIVATE = Connection()


@asynccontextmanager
async def connect(connection: Connection) -> AsyncIterator[Client]:
    """A client of a server that is ready.

    Raises:
        Failure: the server cannot be reached, cannot start or stopped.
        SlotwireError: what the server answered.
    """
    if connection.server is not None:
        if connection.model is not None:
            raise Failure("--model is for a private server; leave --server (SLOTWIRE_SERVER) out, or --model", code=2)
        async with _client(connection.server) as client:
            yield client
        return
    async with _private_server(connection.model) as private, _client(private.address, private.failure) as client:
        yield client


@asynccontextmanager
async def _client(address: str, cause: Callable[[], Failure | None] = lambda: None) -> AsyncIterator[Client]:
    async with Client(address) as client:
        try:
            await _await_model(client)
            yield client
        except Unavailable as error:
            if error.reason is not None:
                raise
            raise cause() or Failure(f"cannot reach {address}: {error.message}") from None


async def _await_model(client: Client) -> None:
    """Shows how far the model is loaded, on a terminal, until it is."""
    info = await client.server_info(timeout=_ANSWER_SECONDS)
    if info.state is not ServerState.LOADING:
        return
    columns = (TextColumn("loading the model"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("load", total=1.0)
        while info.state is ServerState.LOADING:
            progress.update(task, completed=info.load_progress)
            await asyncio.sleep(_POLL_SECONDS)
            info = await client.server_info(timeout=_ANSWER_SECONDS)


@dataclass(frozen=True, slots=True)
class _PrivateServer:
    socket: Path
    log: Path
    process: asyncio.subprocess.Process

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    @property
    def listening(self) -> bool:
        return self.socket.exists()

    def failure(self) -> Failure | None:
        """Why it stopped, with its last words; None while it runs."""
        code = self.process.returncode
        if code is None:
            return None
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return Failure(f"the private server stopped: {words.removeprefix('slotwire: ')}", code=2 if code == 2 else 1)


@asynccontextmanager
async def _private_server(model: Path | None) -> AsyncIterator[_PrivateServer]:
    """Starts a server on a socket of its own, and stops it whatever happens."""
    with _terminating(), tempfile.TemporaryDirectory(prefix="slotwire-") as folder:
        socket, log = Path(folder, "socket"), Path(folder, "log")
        # What belongs to a server of the operator's in the environment or a settings file is overruled.
        command = ["-m", "service.cli", "serve", "--listen", f"unix:{socket}", "--log-level", "warning"]
        command += ["--ready-file", str(Path(folder, "ready"))]
        if model is not None:
            command += ["--model", str(model)]
        with log.open("wb") as output:  # noqa: ASYNC230  # nothing else runs yet
            # A session of its own, so that Ctrl-C reaches this process alone, which then stops the server.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            server = _PrivateServer(socket, log, process)
            await _await_socket(server)
            yield server
        finally:
            await _stop(process)


async def _await_socket(server: _PrivateServer) -> None:
    """Before that, a client's attempt would fail and make it wait a second. Raises Failure where the server stops."""
    exited = asyncio.create_task(server.process.wait())
    try:
        while not server.listening:
            done, _ = await asyncio.wait({exited}, timeout=_POLL_SECONDS / 2)
            if done:
                raise server.failure() or Failure("the private server stopped")
    finally:
        exited.cancel()


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    try:
        process.terminate()
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except BaseException as error:
        if process.returncode is None:
            process.kill()
        if not isinstance(error, TimeoutError):
            raise
        await process.wait()


@contextmanager
def _terminating() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP unwind this process, so that it stops what it started."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
