"""The objects of a store in a directory.

State holds what people said, so only the owner may enter. obstore's local store follows symbolic links, knows nothing
of permissions, and leaves it to the system when bytes are on the disk; all three is seen to here. It also reads files
in pieces of 8 KiB, each on a thread: 0.2 GiB/s where 1.5 are possible (page cache, two cores), so reading is done here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Set
from functools import partial
from pathlib import Path

from obstore.store import LocalStore

from service.errors import ConfigError, Unavailable
from service.state.objects import CHUNK, FOLDERS, Found, Objects, Source, failure

_LEFTOVER = re.compile(r"(.*)#\d+")
"""What obstore writes before it renames it, and does not list."""

_SLOW_DISK = 10
"""Times the usual patience: what was written in minutes may wait to get to the disk."""


class Directory(Objects):
    """Files in two folders of a directory, which is made where it is missing.

    Nothing in it that is a symbolic link is used, nor anything else that is no file. Raises ConfigError where the
    directory cannot be used.
    """

    def __init__(self, root: Path, patience: float) -> None:
        self._root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in FOLDERS:
                _make_private(root / folder)
            store = LocalStore(root)
        except OSError as error:
            raise ConfigError(f"snapshots cannot be kept in {root}: {error.strerror}", reason="STORE") from None
        super().__init__(store, patience)

    async def open(self, folder: str, key: str) -> Source | None:
        await self._guard(folder, key)
        try:
            file = await self._call(asyncio.to_thread(_File, self._root / folder / key))
        except FileNotFoundError:
            return None
        return Source(file.size, partial(asyncio.to_thread, file.read))

    async def found(self, folder: str) -> list[Found]:
        await self._guard(folder)
        found = await super().found(folder)
        return await self._call(asyncio.to_thread(self._files, folder, found))

    async def remove_leftovers(self, before: float, keep: Set[str]) -> int:
        for folder in FOLDERS:
            await self._guard(folder)
        return await self._call(asyncio.to_thread(self._remove_leftovers, before, keep))

    async def _guard(self, folder: str, key: str = "") -> None:
        problem = await self._call(asyncio.to_thread(self._problem, folder, key))
        if problem:
            raise Unavailable(f"{problem}: the snapshot store does not use it", reason="STORE_UNSAFE")

    async def _settle(self, folder: str, key: str) -> None:
        try:
            await self._call(asyncio.to_thread(_make_durable, self._root / folder, key), times=_SLOW_DISK)
        except FileNotFoundError as error:
            raise failure(error) from None

    def _problem(self, folder: str, key: str) -> str:
        if not _is(stat.S_ISDIR, self._root / folder):
            return f"{folder} is no directory"
        path = self._root / folder / key
        if key and os.path.lexists(path) and not _is(stat.S_ISREG, path):
            return f"{folder}/{key} is no file"
        return ""

    def _files(self, folder: str, found: Iterable[Found]) -> list[Found]:
        return [item for item in found if _is(stat.S_ISREG, self._root / folder / item.key)]

    def _remove_leftovers(self, before: float, keep: Set[str]) -> int:
        count = 0
        for folder in FOLDERS:
            for item in os.scandir(self._root / folder):
                found = _LEFTOVER.fullmatch(item.name)
                if found is None or found[1] in keep:
                    continue
                with contextlib.suppress(FileNotFoundError):  # its writer has come to an end
                    if item.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(item.path)
                        count += 1
        return count


class _File:
    """A file that is open until nobody has it any more."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read(self) -> bytes:
        return os.read(self._descriptor, CHUNK)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be opened
            os.close(self._descriptor)


def _is(kind: Callable[[int], bool], path: Path) -> bool:
    """Whether a path itself, and not what it may point to, is of a kind."""
    try:
        return kind(path.lstat().st_mode)
    except OSError:
        return False


def _make_private(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is(stat.S_ISDIR, folder):
        raise NotADirectoryError(0, f"{folder.name} in it is no directory")
    if stat.S_IMODE(folder.lstat().st_mode) != 0o700:
        folder.chmod(0o700)


def _make_durable(folder: Path, key: str) -> None:
    """For the owner alone, and on the disk: what is written next counts on it."""
    for name, flags in ((key, 0), ("", os.O_DIRECTORY)):
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags)
        try:
            if name:
                os.fchmod(descriptor, 0o600)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
