"""The token list of an image. Source: `server_tokens::serialize` and `deserialize` of llama-server."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.state.errors import ImageError
from service.state.layout import LIMITS, SECTION_VERSION, Limits

_PACKED = struct.Struct("<iII")  # marker, version, count
_MARKER = -1
_NO_MEDIA = bytes(4)
PACKED_WORDS = 4
"""What a packed list without media has besides the tokens: marker, version, count, number of media keys."""


@dataclass(frozen=True, slots=True)
class TokenList:
    """Tokens as they are stored, 4 bytes each, so that a long list stays small.

    `packed` is False for the plain list of an older server. `media` is what a packed list has behind its tokens (keys
    and chunks, not looked into) where pictures or sound are part of it; their places hold token -1.
    """

    data: bytes
    packed: bool = True
    media: bytes = _NO_MEDIA

    @classmethod
    def of(cls, tokens: Iterable[int]) -> TokenList:
        return cls(np.fromiter(tokens, "<i4").tobytes())

    def __len__(self) -> int:
        return len(self.data) // 4

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Read-only."""
        return np.frombuffer(self.data, "<i4")

    @property
    def has_media(self) -> bool:
        return self.media != _NO_MEDIA

    def pack(self) -> bytes:
        """The words of the image, without their number."""
        if not self.packed:
            return self.data
        return _PACKED.pack(_MARKER, SECTION_VERSION, len(self)) + self.data + self.media


def unpack(words: bytes, *, limits: Limits = LIMITS, offset: int = 0) -> TokenList:
    """The list that `words`, a multiple of 4 bytes, hold. `offset` is where they begin. Raises ImageError."""
    if words[:4] != _MARKER.to_bytes(4, "little", signed=True):
        tokens = TokenList(words, packed=False)
    else:
        if len(words) < _PACKED.size + 4:
            raise ImageError("the token list is cut off", offset=offset)
        _, version, count = _PACKED.unpack_from(words)
        if version != SECTION_VERSION:
            raise ImageError(f"token list of version {version}", offset=offset + 4)
        end = _PACKED.size + 4 * count
        if end + 4 > len(words):
            raise ImageError(f"{count} tokens do not fit into {len(words)} bytes", offset=offset + 8)
        tokens = TokenList(words[_PACKED.size : end], media=words[end:])
        if tokens.media[:4] == _NO_MEDIA and tokens.has_media:
            raise ImageError("data behind the token list", offset=offset + end + 4)
    if len(tokens) > limits.tokens:
        raise ImageError(f"{len(tokens)} tokens, more than {limits.tokens}", offset=offset)
    least = -1 if tokens.has_media else 0
    if len(tokens) and int(tokens.ids.min()) < least:
        raise ImageError(f"token {tokens.ids.min()}", offset=offset)
    return tokens
