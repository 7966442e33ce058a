"""Text to tokens and back. Read-only and thread-safe: it may be used from any thread."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import llama_cpp

from service.errors import FieldViolation, InvalidRequest

_PIECE_BYTES = 256
_INT32_MAX = 2**31 - 1
_PARSED = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN


class Vocabulary:
    """The tokens of a model. `pieces[i]` are the bytes that token i adds to a text; control tokens add none."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.size: int = llama_cpp.llama_vocab_n_tokens(handle)
        self.pieces: list[bytes] = [self._piece(token, special=False) for token in range(self.size)]
        self.end_tokens = frozenset(t for t in range(self.size) if llama_cpp.llama_vocab_is_eog(handle, t))
        self.longest_piece = max(map(len, self.pieces), default=1)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The tokens of `text`. With `add_special` the model's own opening tokens come first; with `parse_special`
        the names of control tokens in the text become these tokens.
        """
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > _INT32_MAX:
            raise InvalidRequest(FieldViolation("prompt", f"{len(data)} bytes; at most {_INT32_MAX}"))
        room = len(data) + 2
        buffer = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self._handle, data, len(data), buffer, room, add_special, parse_special)
        if count < 0:
            room = -count
            buffer = (llama_cpp.llama_token * room)()
            count = llama_cpp.llama_tokenize(self._handle, data, len(data), buffer, room, add_special, parse_special)
        return list(buffer[:count])

    def detokenize(self, tokens: Iterable[int], *, special: bool) -> bytes:
        """The bytes of `tokens`; with `special` control tokens appear by their names."""
        if special:
            return b"".join(self._piece(token, special=True) for token in tokens)
        return b"".join(map(self.pieces.__getitem__, tokens))

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """The text and the attributes (a bit set) of every token, in the order of their ids."""
        for token in range(self.size):
            text: bytes = llama_cpp.llama_vocab_get_text(self._handle, token) or b""
            yield text, int(llama_cpp.llama_vocab_get_attr(self._handle, token))

    def check(self, field: str, tokens: Sequence[int]) -> None:
        """Raise InvalidRequest at the first id that is no token; beyond this llama.cpp would fail the whole batch."""
        for index, token in enumerate(tokens):
            if not 0 <= token < self.size:
                raise InvalidRequest(FieldViolation(f"{field}[{index}]", f"{token} is not in [0, {self.size})"))

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """Texts that would become control tokens, or the unknown token, if they were parsed."""
        control = (t for t in range(self.size) if llama_cpp.llama_vocab_get_attr(self._handle, t) & _PARSED)
        return tuple(text for text in map(self._text, control) if text)

    @property
    def bos(self) -> str:
        return self._text(llama_cpp.llama_vocab_bos(self._handle))

    @property
    def eos(self) -> str:
        return self._text(llama_cpp.llama_vocab_eos(self._handle))

    def _text(self, token: int) -> str:
        if not 0 <= token < self.size:
            return ""
        text: bytes = llama_cpp.llama_vocab_get_text(self._handle, token) or b""
        return text.decode("utf-8", "replace")

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        length = llama_cpp.llama_token_to_piece(self._handle, token, buffer, _PIECE_BYTES, 0, special)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = llama_cpp.llama_token_to_piece(self._handle, token, buffer, -length, 0, special)
        return buffer.raw[:length]
