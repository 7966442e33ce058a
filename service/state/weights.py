"""The digest of a model file's content, kept in a small file so that a large model is read through only once."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from service.errors import ConfigError
from service.state.integrity import BLAKE3, Digest, digest_of

log = logging.getLogger("slotwire.state")

_PIECE = 1 << 20
"""Bytes read at once. Smaller and larger ones were not faster (3 GB/s from the page cache)."""
_COARSEST_NS = 2_000_000_000
"""The coarsest time stamps of file systems. A file that changed less long ago is read again the next time."""
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
_CACHE_FILE = "weights.json"
_CACHE_FORMAT = 1
_CACHE_ENTRIES = 64
_CACHE_BYTES = 4 << 20
"""More than that many entries with the longest paths have."""
_DIGEST = re.compile(BLAKE3 + r":[0-9a-f]{64}")


class HashingCancelled(Exception):
    """The caller no longer wants the digest."""


def weights_digest(
    path: Path,
    *,
    cache: Path | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    clock: Callable[[], int] = time.time_ns,
) -> str:
    """The digest of the content of a model file; where it is one of several parts, of all of them.

    It reads through the file unless it is unchanged since the last time, by what the directory `cache` remembers.
    For a thread of its own: it frees the GIL while it reads and hashes, takes about 1 MiB, and asks `cancelled` after
    each piece. `clock` is that of the files, in nanoseconds since the epoch.

    Raises HashingCancelled, OSError, and ConfigError for a file that changes meanwhile.
    """
    digests = [_file_digest(part, cache, cancelled, clock) for part in parts(path)]
    return digests[0] if len(digests) == 1 else digest_of(f"{digest}\n".encode() for digest in digests)


def parts(path: Path) -> list[Path]:
    """All files of the model that `path` belongs to, by llama.cpp's names: model-00001-of-00003.gguf."""
    found = _PART.fullmatch(path.name)
    if found is None or not 1 <= int(found["part"]) <= int(found["parts"]):
        return [path]
    count = int(found["parts"])
    return [path.with_name(f"{found['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class _Identity:
    """A file whose identity is the same has the same content."""

    size: int
    inode: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Identity:
        return cls(status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)

    def settled(self, now: int) -> bool:
        """Whether a change from now on will have another time stamp than the last one."""
        return now - max(self.modified_ns, self.changed_ns) > _COARSEST_NS


def _file_digest(path: Path, cache: Path | None, cancelled: Callable[[], bool], clock: Callable[[], int]) -> str:
    path = path.resolve(strict=True)
    with path.open("rb", buffering=0) as file:
        identity = _Identity.of(os.fstat(file.fileno()))
        known = _remembered(cache, path, identity) if cache else None
        if known is not None:
            return known
        digest = _read(file, identity.size, cancelled)
        settled = identity.settled(clock())
        if _Identity.of(os.fstat(file.fileno())) != identity:
            raise ConfigError(f"{path.name} changed while it was read", reason="MODEL_CHANGED")
    if cache and settled:
        _remember(cache, path, identity, digest)
    return digest


def _read(file: FileIO, size: int, cancelled: Callable[[], bool]) -> str:
    """The digest of the first `size` bytes: a file that grows has no end."""
    digest, piece = Digest(BLAKE3), memoryview(bytearray(_PIECE))
    while size > 0 and (got := file.readinto(piece[:size])):
        digest.update(piece[:got])
        size -= got
        if cancelled():
            raise HashingCancelled
    return digest.text()


def _remembered(cache: Path, path: Path, identity: _Identity) -> str | None:
    entry = _entries(cache).get(str(path))
    if not isinstance(entry, dict) or not isinstance(digest := entry.get("digest"), str):
        return None
    return digest if _DIGEST.fullmatch(digest) and entry == _entry(identity, digest) else None


def _remember(cache: Path, path: Path, identity: _Identity, digest: str) -> None:
    """Of two processes that do this at once, one may be forgotten; the file is whole in any case."""
    entries = _entries(cache)
    entries.pop(str(path), None)
    entries[str(path)] = _entry(identity, digest)
    newest = dict(list(entries.items())[-_CACHE_ENTRIES:])
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _replace(cache / _CACHE_FILE, json.dumps({"format": _CACHE_FORMAT, "files": newest}, indent=1))
    except (OSError, ValueError) as error:
        log.warning("kept no digest of %s: %s", path.name, error)


def _entry(identity: _Identity, digest: str) -> dict[str, Any]:
    return {**asdict(identity), "digest": digest}


def _entries(cache: Path) -> dict[str, Any]:
    """By path, the oldest first. Empty where there is no file that we wrote."""
    try:
        with (cache / _CACHE_FILE).open("rb") as file:
            value = json.loads(file.read(_CACHE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    files = value.get("files") if isinstance(value, dict) and value.get("format") == _CACHE_FORMAT else None
    return files if isinstance(files, dict) else {}


def _replace(path: Path, text: str) -> None:
    """Write a file so that others see the old one or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
