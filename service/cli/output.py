"""How commands show values."""

from __future__ import annotations

import enum
import json
import re
import sys
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.console import Console

from slotwire_client import Event, GenerationResult

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Text of a model without the characters that command a terminal; newlines and tabs stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def table_console() -> Console:
    """For a table: as wide as the terminal, and elsewhere wide enough for every line."""
    console = Console()
    return console if console.is_terminal else Console(width=10_000)


def write(text: str) -> None:
    """Shows a piece of text at once; untouched unless it goes to a terminal."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def write_json(value: Any) -> None:
    """One value as one line of JSON."""
    print(json.dumps(value, default=_plain, ensure_ascii=False), flush=True)


def event_fields(event: Event) -> dict[str, Any]:
    """An event with its kind: started, progress, delta or finished."""
    return {"event": type(event).__name__.lower(), **asdict(event)}


def summary(result: GenerationResult) -> str:
    """What a generation took, in a line; of the times, what the server told."""
    usage, timings = result.usage, result.timings
    parts = [f"{usage.generated_tokens} tokens", f"ended by {result.reason.value.replace('_', ' ')}"]
    if timings is not None:
        if timings.generation > 0:
            parts.insert(1, f"{(usage.generated_tokens - 1) / timings.generation:.1f} tokens/s")
        parts.append(f"queue {timings.queue * 1000:.0f} ms, prompt {timings.prompt * 1000:.0f} ms")
    parts.append(f"prompt {usage.prompt_tokens} tokens, {usage.reused_tokens} reused")
    if result.speculation is not None:
        drafts = result.speculation
        parts.append(f"{drafts.accepted_tokens} of {drafts.drafted_tokens} drafted tokens accepted")
    parts.append(f"slot {result.slot_id}, seed {result.seed}")
    return "; ".join(parts)


def size(count: int) -> str:
    """Bytes in a unit that people read."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _plain(value: object) -> object:
    match value:
        case enum.Enum():
            return value.value
        case bytes():
            return list(value)
        case datetime():
            return value.isoformat()
        case _:
            return str(value)
