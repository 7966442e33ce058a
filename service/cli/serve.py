"""`slotwire serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from service.config import Settings

_DEFAULTS = Settings()


def serve(
    *,
    settings: Annotated[Settings, Parameter(name="*", show_env_var=False, negative_iterable=())] = _DEFAULTS,
    config: Annotated[Path | None, Parameter(show_env_var=False)] = None,
) -> int:
    """Load a model and serve it.

    Args:
        config: TOML file with settings.
    """
    # Only here, because it loads llama.cpp, which no other command needs.
    from service.server import run

    return run(settings)
