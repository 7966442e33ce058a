"""Conversations that lost their slot, kept in host memory until they come back."""

from __future__ import annotations

from collections import OrderedDict

from service.engine.sequence import Sequence
from service.engine.slots import common_prefix
from service.engine.types import SlotContents

WORTH = 128
"""Tokens; fewer are computed again in no time."""


class Shelf:
    """Contents of slots, at most `max_bytes` of states together; those used longest ago go first.

    `whole` tells that a state is of use only if all its tokens are, since its memory cannot go back.
    """

    def __init__(self, max_bytes: int, *, whole: bool) -> None:
        self._max_bytes, self._whole = max_bytes, whole
        self._kept: OrderedDict[int, SlotContents] = OrderedDict()
        self._next = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def wants(self, tokens: int, size: int) -> bool:
        """Whether a state of that many tokens and bytes would be kept."""
        return tokens >= WORTH and size <= self._max_bytes

    def keep(self, contents: SlotContents) -> None:
        """Put contents on the shelf, in place of older ones that they go on from."""
        for key, other in list(self._kept.items()):
            length = len(other.tokens)
            if other.cache_key == contents.cache_key and contents.tokens[:length] == other.tokens:
                self._drop(key)
        size = _size(contents)
        while self._kept and self.bytes + size > self._max_bytes:
            self._drop(next(iter(self._kept)))
        if size <= self._max_bytes:
            self._kept[self._next] = contents
            self._next += 1
            self.bytes += size

    def take(self, sequence: Sequence, better_than: int) -> SlotContents | None:
        """The contents from which a sequence can reuse most, if that is worth it beside the `better_than` tokens that
        it finds in its slot. They leave the shelf.
        """
        found, most = None, better_than + WORTH - 1
        for key, contents in self._kept.items():
            usable = self._usable(contents, sequence)
            if usable > most:
                found, most = key, usable
        if found is None:
            return None
        contents = self._kept[found]
        self._drop(found)
        return contents

    def _usable(self, contents: SlotContents, sequence: Sequence) -> int:
        request = sequence.request
        if not request.reuse_prefix or request.cache_key != contents.cache_key:
            return 0
        shared = common_prefix(contents.tokens, sequence.reading)
        return 0 if self._whole and shared < len(contents.tokens) else shared

    def _drop(self, key: int) -> None:
        self.bytes -= _size(self._kept.pop(key))


def _size(contents: SlotContents) -> int:
    return len(contents.target) + (len(contents.draft) if contents.draft is not None else 0)
