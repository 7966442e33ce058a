"""`slotwire generate`."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Annotated

from cyclopts import Parameter

from service.cli.connect import PRIVATE, ConnectionOptions, connect
from service.cli.failure import Failure, usage_errors
from service.cli.options import DEFAULTS, Sampling, SamplingOptions
from service.cli.output import event_fields, summary, write, write_json
from service.cli.state import SlotNumber, running
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
    resume: SlotNumber | None = None,
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
        resume: Go on with the generation that was restored with this slot, instead of a prompt.
    """
    if resume is None:
        text = _read_input() if prompt is None else prompt
    else:
        running(connection.server, "--resume")
        _check_alone(sampling, prompt=prompt, chat=chat, session=session, slot=slot)
    options = sampling.options()
    options["session"], options["slot_id"], options["timings"] = session, slot, timings
    async with connect(connection) as client:
        if resume is None:
            asked = await _prompt(client, text, chat)
            with usage_errors():
                generation = client.generate(asked, **options)
        else:
            generation = client.resume(resume, timings=timings)
        async with generation:
            await (_write_events(generation) if json else _write_text(generation))
    if timings and not json:
        print(summary(generation.result), file=sys.stderr)
    return 0


def _check_alone(sampling: Sampling, **others: object) -> None:
    """With --resume all is as it was when the generation began. Raises Failure."""
    given = [name for name, value in others.items() if value is not None]
    given += [item.name for item in fields(Sampling) if getattr(sampling, item.name) != getattr(DEFAULTS, item.name)]
    if given:
        special = {"prompt": "PROMPT", "chat": "--chat and --raw"}
        names = (special.get(name, "--" + name.replace("_", "-")) for name in given)
        raise Failure(f"--resume goes on as the generation began: leave {', '.join(names)} out", code=2)


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
