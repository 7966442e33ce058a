"""The error of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Failure(Exception):
    """A command cannot go on; the message is for people, `code` is the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def usage_errors() -> Iterator[None]:
    """Options that the client refuses to send are errors of usage."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise Failure(str(error), code=2) from None
