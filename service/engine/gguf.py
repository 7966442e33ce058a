"""A first look at a model file, before the library is asked to load it."""

from __future__ import annotations

from pathlib import Path

from service.errors import ConfigError

_MAGIC = b"GGUF"


def check_gguf(setting: str, path: Path) -> None:
    """Raise ConfigError, which names `setting`, unless `path` is a readable file that begins like a GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except FileNotFoundError:
        raise ConfigError(f"{setting}: cannot read {path}: it does not exist", reason="MODEL_MISSING") from None
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}", reason="MODEL_UNREADABLE") from None
    if magic != _MAGIC:
        raise ConfigError(f"{setting}: {path} is no GGUF file; it begins with {magic!r}", reason="MODEL_NO_GGUF")
