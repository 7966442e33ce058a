"""`slotwire generate`."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from service.cli.connect import PRIVATE, ConnectionOptions, connect
from service.cli.failure import Failure, usage_errors
from service.cli.options import DEFAULTS, SamplingOptions
from service.cli.output import event_fields, summary, write, write_json
from slotwire_client import ChatMessage, Client, Generation, Prompt


async def generate(
    prompt: str | None = None,
    /,
    *,
    chat: Annotated[bool | None, Parameter(negative="--raw")] = None,
    json: bool = False,
    timings: bool = False,
    session: str | None = None,
    slot: int | None = None,
    sampling: SamplingOptions = DEFAULTS,
    connection: ConnectionOptions = PRIVATE,
) -> int:
    """Write the text that follows a prompt.

    Args:
        prompt: The prompt. Left out: what standard input has.
        chat: Ask as a user of a chat, or give the model the text as it is. Left out: chat, if the model has a template.
        json: Write each event as a line of JSON instead of the text.
        timings: Tell how long it took, on standard error.
        session: Keep to the slot that this session used before.
        slot: Use this slot.
    """
    text = _read_input() if prompt is None else prompt
    options = sampling.options()
    options["session"], options["slot_id"], options["timings"] = session, slot, timings
    async with connect(connection) as client:
        asked = await _prompt(client, text, chat)
        with usage_errors():
            generation = client.generate(asked, **options)
        async with generation:
            await (_write_events(generation) if json else _write_text(generation))
    if timings and not json:
        print(summary(generation.result), file=sys.stderr)
    return 0


def _read_input() -> str:
    if sys.stdin.isatty():
        raise Failure("give a PROMPT, or send one to standard input", code=2)
    return sys.stdin.read()


async def _prompt(client: Client, text: str, chat: bool | None) -> Prompt:
    if chat is None:
        chat = (await client.model_info()).capabilities.chat
    return [ChatMessage("user", text)] if chat else text


async def _write_events(generation: Generation) -> None:
    async for event in generation.events():
        write_json(event_fields(event))


async def _write_text(generation: Generation) -> None:
    try:
        async for piece in generation:
            write(piece)
    finally:
        write("\n")
