"""`slotwire snapshots`: slot images by name, in the store of a running server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from cyclopts import App, Group, Parameter
from rich.table import Table

from service.cli.connect import connect
from service.cli.output import printable, size, table_console, write_json
from service.cli.state import SlotNumber, restored_lines, running
from service.config import ENV_PREFIX

_Server = Annotated[str | None, Parameter(env_var=ENV_PREFIX + "SERVER", group=Group("Connection", sort_key=9))]

app = App(name="snapshots", help="Keep the states of slots by name in the server's store.", help_format="plaintext")


@app.command(name="list")
async def show(prefix: str = "", /, *, json: bool = False, server: _Server = None) -> int:
    """Show the snapshots of a server.

    Args:
        prefix: Only those whose names begin with it.
        json: Write one line of JSON for each.
        server: Address of the running server (HOST:PORT or unix:/PATH).
    """
    table = Table(box=None, pad_edge=False)
    for title, justify in (("Name", "left"), ("Tokens", "right"), ("Size", "right"), ("Created", "left")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    table.add_column("Model", overflow="ellipsis", no_wrap=True)
    async with connect(running(server, "snapshots")) as client:
        async for snapshot in client.snapshots.list(prefix):
            if json:
                write_json(asdict(snapshot))
                continue
            created = snapshot.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
            model = printable(snapshot.model)
            table.add_row(snapshot.name, f"{snapshot.tokens:,}", size(snapshot.size_bytes), created, model)
    if not json:
        table_console().print(table)
    return 0


@app.command
async def save(
    name: str, slot: SlotNumber, /, *, no_draft: bool = False, force: bool = False, server: _Server = None
) -> int:
    """Keep the state of a slot. A busy slot goes on meanwhile.

    Args:
        name: Letters, digits, '.', '_', '-' and '/' between parts; at most 128.
        slot: The slot.
        no_draft: Leave the draft model's state out.
        force: Replace the snapshot where there is one.
        server: Address of the running server (HOST:PORT or unix:/PATH).
    """
    async with connect(running(server, "snapshots")) as client:
        saved = await client.snapshots.save(name, slot, overwrite=force, draft=not no_draft)
    print(f"{saved.name}: {saved.tokens:,} tokens, {saved.size_bytes:,} bytes, {saved.digest}")
    return 0


@app.command
async def restore(
    name: str,
    /,
    *,
    slot: SlotNumber | None = None,
    session: str | None = None,
    cache_key: str | None = None,
    recompute: bool = False,
    server: _Server = None,
) -> int:
    """Put a snapshot into a slot that is idle.

    Args:
        name: The snapshot.
        slot: The slot. Left out: the server chooses one.
        session: Keep the slot for this session.
        cache_key: Share the state only with requests that have this key.
        recompute: Where the state does not fit the model or its context, compute its tokens instead.
        server: Address of the running server (HOST:PORT or unix:/PATH).
    """
    async with connect(running(server, "snapshots")) as client:
        restored = await client.snapshots.restore(
            name, slot_id=slot, session=session, cache_key=cache_key, recompute=recompute
        )
    print("\n".join(restored_lines(restored)))
    return 0


@app.command
async def delete(name: str, /, *, server: _Server = None) -> int:
    """Delete a snapshot.

    Args:
        name: The snapshot.
        server: Address of the running server (HOST:PORT or unix:/PATH).
    """
    async with connect(running(server, "snapshots")) as client:
        await client.snapshots.delete(name)
    print(f"{name}: deleted")
    return 0
