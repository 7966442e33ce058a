"""`python -m bench COMMAND`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import psutil

from bench import engine
from bench.models import smollm2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("engine", help="the engine against a bare llama_decode loop")
    compare.add_argument("--rounds", type=int, default=3)
    compare.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    compare.add_argument("--model", type=Path, help="default: the embedded model as Q4_0")
    compare.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    report = asyncio.run(engine.measure(options.model or smollm2("Q4_0"), options.rounds, options.threads))
    print(engine.table(report))
    if options.json:
        options.json.write_text(json.dumps(report.as_dict(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
