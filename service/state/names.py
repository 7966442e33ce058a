"""Names of snapshots, what they are called inside a store, and the tokens between two pages of a list."""

from __future__ import annotations

import base64
import re

from service.errors import FieldViolation, InvalidRequest

MAX_NAME = 128
"""Characters."""

_CHARACTERS = re.compile(r"[A-Za-z0-9._/-]*")
_SEPARATOR = "="
"""Stands for '/' in keys. It is in no name, and both file systems and S3 take it as it is."""
_TOKEN_VERSION = "1"
_MAX_TOKEN = 512


def check_name(name: str) -> None:
    """Raises InvalidRequest for what can be no name of a snapshot."""
    components = name.split("/")
    if not _spelled(name) or not {"", ".", ".."}.isdisjoint(components):
        raise _violation(
            "name",
            f"must be 1 to {MAX_NAME} of A-Z, a-z, 0-9, '.', '_', '-' and '/', with something other than '.' and '..' "
            "between the '/'",
        )


def check_prefix(prefix: str) -> None:
    """Raises InvalidRequest for what no name can begin with. The empty prefix is that of all names."""
    if not _spelled(prefix):
        raise _violation("prefix", f"must be up to {MAX_NAME} of A-Z, a-z, 0-9, '.', '_', '-' and '/'")


def key_of(name: str) -> str:
    """One flat key for each name: no name is a folder of another."""
    return name.replace("/", _SEPARATOR)


def name_of(key: str) -> str | None:
    """The name whose key this is; None where it is none."""
    name = key.replace(_SEPARATOR, "/")
    try:
        check_name(name)
    except InvalidRequest:
        return None
    return name if key_of(name) == key else None


def page_token(prefix: str, last: str) -> str:
    """Asks for the names with this prefix that come after `last`."""
    return base64.urlsafe_b64encode("\n".join((_TOKEN_VERSION, prefix, last)).encode()).decode()


def last_name(token: str, prefix: str) -> str:
    """The name after which a page begins, empty without a token. Raises InvalidRequest for a token of another list."""
    if not token:
        return ""
    try:
        if len(token) > _MAX_TOKEN:
            raise ValueError("too long")
        version, its_prefix, last = base64.b64decode(token, altchars=b"-_", validate=True).decode("ascii").split("\n")
        check_name(last)
    except (ValueError, InvalidRequest):
        raise _violation("page_token", "must be one that a list returned") from None
    if version != _TOKEN_VERSION or its_prefix != prefix or not last.startswith(prefix):
        raise _violation("page_token", "must be one that a list with the same prefix returned")
    return last


def _spelled(text: str) -> bool:
    return len(text) <= MAX_NAME and _CHARACTERS.fullmatch(text) is not None


def _violation(field: str, description: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field, description))
