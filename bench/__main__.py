"""`python -m bench COMMAND`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import psutil

from bench import engine, speculation, state
from bench.models import smollm2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("engine", help="the engine against a bare llama_decode loop")
    compare.add_argument("--rounds", type=int, default=3)
    compare.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    compare.add_argument("--model", type=Path, help="default: the embedded model as Q4_0")
    compare.add_argument("--json", type=Path, help="write the figures there, too")
    drafts = commands.add_parser("speculation", help="drafts against the same server without them")
    drafts.add_argument("--rounds", type=int, default=3)
    drafts.add_argument("--tiny", type=Path, default=Path("tests/models"), help="folder of the tiny hybrid models")
    drafts.add_argument("--json", type=Path, help="write the figures there, too")
    slots = commands.add_parser("state", help="saving and restoring slots")
    slots.add_argument("--rounds", type=int, default=3)
    slots.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    if options.command == "engine":
        report = asyncio.run(engine.measure(options.model or smollm2("Q4_0"), options.rounds, options.threads))
        table, figures = engine.table(report), report.as_dict()
    elif options.command == "state":
        measured = asyncio.run(state.measure(options.rounds))
        table, figures = measured.table(), measured.as_dict()
    else:
        found = asyncio.run(speculation.measure(options.rounds, options.tiny if options.tiny.is_dir() else None))
        table, figures = found.table(), found.as_dict()
    print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
