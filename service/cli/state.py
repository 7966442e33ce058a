"""`slotwire save` and `slotwire restore`: the state of a slot into a file, and out of one."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

from cyclopts import Group, Parameter, validators
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from service.cli.connect import Connection, connect
from service.cli.failure import Failure, usage_errors
from service.cli.output import printable
from service.config import ENV_PREFIX
from slotwire_client import InvalidArgument, RestoredSlot, SavedSlot, Unavailable
from slotwire_client.state import OnProgress

_STANDARD = Path("-")
"""Standard output, or standard input."""


def _no_option(kind: object, file: Path) -> None:
    """A hyphen alone is taken as a FILE, which lets misspelt options through."""
    if str(file).startswith("-") and file != _STANDARD:
        raise ValueError(f"It is no option; a file of that name is ./{file}")


SlotNumber = Annotated[int, Parameter(validator=validators.Number(gte=0, lt=1 << 32))]
_File = Annotated[Path, Parameter(allow_leading_hyphen=True, validator=_no_option)]
_Server = Annotated[str | None, Parameter(env_var=ENV_PREFIX + "SERVER", group=Group("Connection", sort_key=9))]


async def save(
    slot: SlotNumber,
    file: _File,
    /,
    *,
    no_draft: bool = False,
    force: bool = False,
    server: _Server = None,
) -> int:
    """Write the state of a slot to a file: a slot image. A busy slot goes on meanwhile.

    Args:
        slot: The slot.
        file: The file, which must not exist yet; - is standard output.
        no_draft: Leave the draft model's state out.
        force: Replace the file where there is one.
        server: Address of the running server (HOST:PORT or unix:/PATH).
    """
    connection = running(server, "save")
    with _written(file, force=force) as sink:
        async with connect(connection) as client:
            with _progress("saving") as on_progress:
                saved = await client.save_slot(slot, sink, draft=not no_draft, on_progress=on_progress)
    print(_saved(slot, saved), file=sys.stderr if file == _STANDARD else sys.stdout)
    return 0


async def restore(
    file: _File,
    /,
    *,
    slot: SlotNumber | None = None,
    session: str | None = None,
    cache_key: str | None = None,
    recompute: bool = False,
    upload_id: str | None = None,
    server: _Server = None,
) -> int:
    """Put a slot image into a slot that is idle: one of ours, or a slot file that llama-server saved.

    Args:
        file: The file; - is standard input.
        slot: The slot. Left out: the server chooses one.
        session: Keep the slot for this session.
        cache_key: Share the state only with requests that have this key.
        recompute: Where the state does not fit the model or its context, compute its tokens instead.
        upload_id: A name for the upload, so that it can go on if the connection breaks: 1 to 128 of A-Z a-z 0-9 . _ -
        server: Address of the running server (HOST:PORT or unix:/PATH).
    """
    connection = running(server, "restore")
    with _opened(file) as source:
        async with connect(connection) as client:
            with _progress("restoring") as on_progress, _explained(file, upload_id), usage_errors():
                restored = await client.restore_slot(
                    source,
                    slot_id=slot,
                    session=session,
                    cache_key=cache_key,
                    recompute=recompute,
                    upload_id=upload_id,
                    on_progress=on_progress,
                )
    print("\n".join(restored_lines(restored)))
    return 0


def running(server: str | None, what: str) -> Connection:
    """A server that `what` is about: a private one would have nothing in its slots. Raises Failure."""
    if not server:
        raise Failure(f"{what} needs a running server: name it with --server or {ENV_PREFIX}SERVER", code=2)
    return Connection(server)


# Files


@contextmanager
def _written(file: Path, *, force: bool) -> Iterator[BinaryIO]:
    """What is to become `file`, which it does only when it is whole. Readable by its owner alone: it has a text in it.

    Raises Failure.
    """
    if file == _STANDARD:
        if sys.stdout.isatty():
            raise Failure("a slot image is no text: send standard output to a file, or name one", code=2)
        try:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # its reader is gone; `main` knows what to do
            raise
        except OSError as error:
            raise Failure(f"cannot write standard output: {error.strerror or error}") from None
        return
    target = Path(os.path.realpath(file))  # a link stays one
    try:
        _check_free(file, target, force)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".slotwire-", suffix=".part")
        try:
            with open(handle, "wb") as sink:
                yield sink
                sink.flush()
                os.fsync(sink.fileno())
            _place(Path(name), target, force)
        finally:
            Path(name).unlink(missing_ok=True)
    except FileExistsError:
        raise _exists(file) from None
    except OSError as error:
        raise Failure(f"cannot write {file}: {error.strerror or error}") from None


def _check_free(file: Path, target: Path, force: bool) -> None:
    if target.exists():
        if not target.is_file():
            raise Failure(f"{file} is no regular file", code=2)
        if not force:
            raise _exists(file)


def _place(made: Path, target: Path, force: bool) -> None:
    """Raises FileExistsError where someone else made `target` meanwhile."""
    if not force:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    made.replace(target)


def _exists(file: Path) -> Failure:
    return Failure(f"{file} exists; --force replaces it", code=2)


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """The file, or a copy of what comes through a pipe: its size must be known first. Raises Failure."""
    name = "standard input" if file == _STANDARD else str(file)
    if file == _STANDARD and sys.stdin.isatty():
        raise Failure("name a FILE, or send one to standard input", code=2)
    with ExitStack() as stack:
        try:
            source: BinaryIO = sys.stdin.buffer if file == _STANDARD else stack.enter_context(file.open("rb"))
            if not source.seekable():
                spool = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(source, spool)
                spool.seek(0)
                source = spool
            start = source.tell()
            if source.seek(0, io.SEEK_END) <= start:
                raise Failure(f"{name} is empty")
            source.seek(start)
            yield source
        except OSError as error:
            raise Failure(f"cannot read {name}: {error.strerror or error}") from None


# Words


@contextmanager
def _progress(what: str) -> Iterator[OnProgress]:
    """Shows how far it is, on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, size: progress.update(task, completed=done, total=size)


@contextmanager
def _explained(file: Path, upload_id: str | None) -> Iterator[None]:
    """Says what an error means for the file, and how an upload goes on that broke off."""
    try:
        yield
    except InvalidArgument as error:
        if error.violations:
            raise
        name = "standard input" if file == _STANDARD else file
        raise Failure(f"{name}: {error.message}") from None
    except Unavailable as error:
        if error.reason is not None:
            raise
        advice = "the same command goes on where it ended" if upload_id else "with an --upload-id it could go on"
        raise Failure(f"the connection broke: {error.message}; {advice}") from None


def _saved(slot: int, saved: SavedSlot) -> str:
    line = f"slot {slot}: {saved.tokens:,} tokens, {saved.size_bytes:,} bytes, {saved.digest}"
    return line + (", a generation can be resumed" if saved.resumable else ", no generation to resume")


def restored_lines(restored: RestoredSlot) -> Iterator[str]:
    yield f"slot {restored.slot_id}: {restored.restored_tokens:,} tokens" + (
        " computed, since their state does not fit" if restored.recomputed else ""
    )
    yield "used: " + ", ".join(section.name for section in restored.sections if section.applied)
    for section in restored.sections:
        if not section.applied:
            yield f"dropped: {section.name}: {_line(section.reason)}"
    yield (
        f"{restored.size_bytes:,} bytes received in {restored.receive_time.total_seconds() * 1000:,.0f} ms, "
        f"applied in {restored.apply_time.total_seconds() * 1000:,.0f} ms"
    )
    if restored.resumable:
        yield f"a generation can be resumed: slotwire generate --resume {restored.slot_id}"


def _line(text: str) -> str:
    """On one line and harmless: it may quote the image."""
    return " ".join(printable(text).split())
