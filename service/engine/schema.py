"""A check of JSON schema text before it is turned into a grammar (`schema_gbnf`)."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from jsonschema.validators import Draft202012Validator, validator_for

from service.engine.grammar_text import GrammarError, GrammarLimit

MAX_BYTES = 256 * 1024
"""Of the text as UTF-8."""
MAX_DEPTH = 64
"""Of objects and lists in one another."""
MAX_CONTAINERS = 2000
"""Objects and lists."""
MAX_ITEMS = 1024
"""Of one list."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_SHOWN = 200

Path = tuple[str | int, ...]
"""Keys and indices that lead to a place in a document."""


def check_schema(text: str) -> dict[str, object] | bool:
    """The schema in `text`, which holds to its metaschema (`$schema`, by default JSON Schema 2020-12).

    References stay within the document. Raises GrammarError: with line and column where `text` is no JSON, else with
    the JSON pointer (RFC 6901) of the place in its message; GrammarLimit where a limit is exceeded.
    """
    document = _parse(text)
    _Survey().value(document, ())
    if isinstance(document, dict):
        _check_metaschema(document)
    return document


def fail(path: Path, message: str, kind: type[GrammarError] = GrammarError) -> NoReturn:
    """Raise `kind` about the place in a schema that `path` leads to."""
    pointer = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
    text = f"at {_shortened(pointer)}: {_shortened(message)}" if pointer else _shortened(message)
    raise kind(text.encode("utf-8", "backslashreplace").decode())


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _parse(text: str) -> dict[str, object] | bool:
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_BYTES:
        raise GrammarLimit(f"the text has {size} bytes; at most {MAX_BYTES}")
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise GrammarError(f"this is no JSON: {error.msg}", error.lineno, error.colno) from None
    except RecursionError:
        raise GrammarLimit(f"objects and lists are nested deeper than {MAX_DEPTH}") from None
    except ValueError:  # from `_refuse_constant`, or from `int` beyond sys.get_int_max_str_digits()
        raise GrammarError("this is no JSON: NaN, Infinity, or a number with thousands of digits") from None
    if not isinstance(document, dict | bool):
        raise GrammarError("a schema must be a JSON object, true or false")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _check_metaschema(document: Any) -> None:
    if not isinstance(document.get("$schema", ""), str):
        fail(("$schema",), "this is not a string")
    kind = validator_for(document, default=Draft202012Validator)
    # no `check_schema`: that also compiles patterns, as Python's own kind of regular expression
    if error := next(kind(kind.META_SCHEMA).iter_errors(document), None):
        fail(tuple(error.absolute_path), error.message)


class _Survey:
    """Checks every value where it stands. Data (`enum`, `default`) is held to the same rules as schemas, because a
    reference may point into it."""

    def __init__(self) -> None:
        self.containers = 0

    def value(self, value: object, path: Path) -> None:
        if not isinstance(value, dict | list):
            return
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise GrammarLimit(f"the schema has more than {MAX_CONTAINERS} objects and lists")
        if len(path) >= MAX_DEPTH:
            fail(path, f"objects and lists are nested deeper than {MAX_DEPTH}", GrammarLimit)
        if isinstance(value, list):
            if len(value) > MAX_ITEMS:
                fail(path, f"the list has {len(value)} items; at most {MAX_ITEMS}", GrammarLimit)
            for index, item in enumerate(value):
                self.value(item, (*path, index))
            return
        for keyword in _REFERENCES:
            target = value.get(keyword)
            if isinstance(target, str) and not target.startswith("#"):
                fail((*path, keyword), f"{target!r} leaves the document; a reference must begin with '#'")
        for key, item in value.items():
            self.value(item, (*path, key))
