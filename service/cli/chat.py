"""`slotwire chat`."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from service.cli.connect import PRIVATE, ConnectionOptions, connect
from service.cli.failure import usage_errors
from service.cli.options import DEFAULTS, SamplingOptions
from service.cli.output import summary, write
from slotwire_client import Chat, ChatMessage, Client, GenerateOptions, SlotwireError

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  # gives `input` line editing and a history

_HINT = "Ctrl-C stops an answer, /reset begins anew, /quit or Ctrl-D ends."


def chat(
    *,
    system: str | None = None,
    session: str | None = None,
    timings: bool = False,
    sampling: SamplingOptions = DEFAULTS,
    connection: ConnectionOptions = PRIVATE,
) -> int:
    """Talk to the model. The server keeps the conversation in a slot, so that each answer begins at once.

    Args:
        system: What the model is told first.
        session: Name of the session on the server. Left out: a new one.
        timings: Tell how long each answer took.
    """
    options = sampling.options()
    options["timings"] = timings
    # The event loop rests while a line is typed: `input` in the main thread is the one that Ctrl-C and Ctrl-D reach.
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            client = runner.run(stack.enter_async_context(connect(connection)))
            _converse(runner, client, client.chat(session, system), options, system)
        finally:
            runner.run(stack.aclose())
    return 0


def _converse(
    runner: asyncio.Runner, client: Client, conversation: Chat, options: GenerateOptions, system: str | None
) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        print(_HINT, file=sys.stderr)
    while (line := _read_line("> " if interactive else "")) is not None:
        match line.strip():
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                conversation = client.chat(None, system)
            case command if command.startswith("/"):
                print(f"{command.split()[0]} is unknown. {_HINT}", file=sys.stderr)
            case text:
                _answer(runner, conversation, text, options)


def _read_line(prompt: str) -> str | None:
    """A line; None at the end of the input. Ctrl-C drops what was typed."""
    while True:
        try:
            return input(prompt)
        except EOFError:
            if prompt:
                print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)


def _answer(runner: asyncio.Runner, conversation: Chat, text: str, options: GenerateOptions) -> None:
    written: list[str] = []
    said = len(conversation.messages)
    try:
        runner.run(_stream(conversation, text, options, written))
    except KeyboardInterrupt:
        # What was read is part of the conversation, for the user as for the slot.
        if written and len(conversation.messages) == said:
            conversation.messages += [ChatMessage("user", text), ChatMessage("assistant", "".join(written))]
        print("\n(stopped)", file=sys.stderr)
    except SlotwireError as error:
        print(f"\nslotwire: {error.message}", file=sys.stderr)


async def _stream(conversation: Chat, text: str, options: GenerateOptions, written: list[str]) -> None:
    with usage_errors():
        answer = conversation.send(text, **options)
    async with answer:
        async for piece in answer:
            written.append(piece)
            write(piece)
    write("\n")
    if options.get("timings"):
        print(summary(answer.result), file=sys.stderr)
