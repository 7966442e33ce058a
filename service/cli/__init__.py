"""The command `slotwire`. Composition only: what a command does is in its own module."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group, Parameter

import service
from service.cli.chat import chat
from service.cli.demo import demo
from service.cli.failure import Failure
from service.cli.generate import generate
from service.cli.inspect import inspect
from service.cli.models import models
from service.cli.serve import serve
from service.cli.slots import slots
from service.cli.snapshots import app as snapshots
from service.cli.state import restore, save
from service.config import sources
from service.errors import ConfigError
from slotwire_client import SlotwireError

USAGE_ERROR = 2
"""Exit code for what can be mended on the command line, in the environment or in the settings file."""

_EPILOGUE = (
    "Every option can also be given in the environment, as SLOTWIRE_ and its name (SLOTWIRE_SLOTS=8), and in a TOML "
    "file (slots = 8, at the top or in the table of its group, such as [context]). The command line wins over the "
    "environment, which wins over the file."
)

app = App(
    name="slotwire",
    help="An async gRPC service over llama.cpp that batches, streams and keeps the state of conversations.",
    version=service.__version__,
    help_format="plaintext",
    group_commands=Group("Commands", sort_key=0),
)
app.command(serve, name="serve", config=sources(), help_epilogue=_EPILOGUE)
for command in (generate, chat, demo, slots, save, restore, models, inspect):
    app.command(command, default_parameter=Parameter(negative_bool=(), negative_iterable=(), show_default=False))
snapshots.default_parameter = Parameter(negative_bool=(), negative_iterable=(), show_default=False)
app.command(snapshots)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code. Errors that are expected become one readable line each."""
    try:
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value", verbose=False)
    except (CycloptsError, ConfigError) as error:
        return _fail(str(error), USAGE_ERROR)
    except Failure as failure:
        return _fail(str(failure), failure.code)
    except SlotwireError as error:
        violations = (f"{violation.field}: {violation.description}" for violation in error.violations)
        news = (violation for violation in violations if violation not in error.message)
        return _fail("\n  ".join([error.message, *news]), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who read our output is gone; the interpreter's last flush must not stumble over that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int) -> int:
    print(f"slotwire: {message}", file=sys.stderr)
    return code
