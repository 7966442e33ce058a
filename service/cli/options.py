"""Options that several client commands share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from service.cli.failure import Failure
from slotwire_client import GenerateOptions


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the text is made. What is left out is the server's default.

    Attributes:
        max_tokens: The most tokens to generate.
        temperature: How much chance there is; 0 takes the most likely token.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches p.
        min_p: Keep tokens at least this likely relative to the best one.
        seed: Fixes the draws, so that the same request gives the same text.
        stop: End the text before this string. May be given several times.
        grammar_file: File with a GBNF grammar that the text must follow.
        json_schema: JSON schema that the text must follow, or @FILE with one.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    grammar_file: Path | None = None
    json_schema: str | None = None

    def over(self, defaults: Sampling) -> Sampling:
        """These options, and those of `defaults` where nothing was given."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(defaults, **{name: value for name, value in given.items() if value not in (None, ())})

    def options(self) -> GenerateOptions:
        """As the client takes them. Raises Failure where a file cannot be read."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": self.stop,
            "grammar": None if self.grammar_file is None else _read(self.grammar_file, "--grammar-file"),
            "json_schema": _read(Path(self.json_schema[1:]), "--json-schema")
            if self.json_schema is not None and self.json_schema.startswith("@")
            else self.json_schema,
        }


SamplingOptions = Annotated[Sampling, Parameter(name="*", group=Group("Sampling", sort_key=5), negative_iterable=())]

DEFAULTS = Sampling()


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Failure(f"{option}: cannot read {path}: {error.strerror}", code=2) from None
    except UnicodeDecodeError as error:
        raise Failure(f"{option}: {path} is not UTF-8: {error.reason} at byte {error.start}", code=2) from None
