"""`slotwire slots`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

from cyclopts import Parameter, validators
from rich.live import Live
from rich.table import Table

from service.cli.connect import PRIVATE, ConnectionOptions, connect
from service.cli.output import table_console, write_json
from slotwire_client import Client, Slot

_STATE_STYLES = {"idle": "dim", "prompt": "yellow", "generating": "green"}


async def slots(
    *,
    watch: bool = False,
    interval: Annotated[float, Parameter(validator=validators.Number(gte=0.05, lte=3600))] = 0.5,
    json: bool = False,
    connection: ConnectionOptions = PRIVATE,
) -> int:
    """Show what the slots of a server do and remember.

    Args:
        watch: Go on until Ctrl-C.
        interval: Seconds between two looks, 0.5 if left out.
        json: Write one line of JSON for each look.
    """
    async with connect(connection) as client:
        if json:
            await _write_json(client, watch, interval)
        elif watch:
            await _watch(client, interval)
        else:
            table_console().print(_table(await client.list_slots()))
    return 0


async def _write_json(client: Client, watch: bool, interval: float) -> None:
    write_json([asdict(slot) for slot in await client.list_slots()])
    while watch:
        await asyncio.sleep(interval)
        write_json([asdict(slot) for slot in await client.list_slots()])


async def _watch(client: Client, interval: float) -> None:
    with Live(_table(await client.list_slots()), auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval)
            live.update(_table(await client.list_slots()), refresh=True)


def _table(slots: Sequence[Slot]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("Slot", justify="right")
    table.add_column("State")
    for title in ("Cached", "Context", "Prompt", "Reused", "Generated"):
        table.add_column(title, justify="right")
    table.add_column("Last used", justify="right")
    table.add_column("Session", overflow="ellipsis", no_wrap=True)
    now = datetime.now(UTC)
    for slot in slots:
        state = slot.state.value
        counts = (
            slot.cached_tokens,
            slot.context_tokens,
            slot.prompt_tokens,
            slot.reused_tokens,
            slot.generated_tokens,
        )
        table.add_row(
            str(slot.id),
            f"[{_STATE_STYLES.get(state, 'red')}]{state}[/]",
            *(f"{count:,}" for count in counts),
            "never" if slot.last_used is None else _ago((now - slot.last_used).total_seconds()),
            slot.session or "",
        )
    return table


def _ago(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 6000 else f"{seconds / 3600:.0f} h ago"
