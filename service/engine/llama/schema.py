"""JSON schema to GBNF, by the converter that llama-cpp-python carries."""

from __future__ import annotations

from llama_cpp.llama_grammar import json_schema_to_gbnf


def schema_to_gbnf(schema: str) -> str:
    """The GBNF for a JSON schema (text). Raises ValueError for one that the converter cannot express."""
    try:
        gbnf: str = json_schema_to_gbnf(schema)
    except (AssertionError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"this schema cannot be turned into a grammar: {error or type(error).__name__}") from None
    return gbnf
