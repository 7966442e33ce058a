"""The check of JSON schemas: what it refuses, and where it says so."""

from __future__ import annotations

import json

import pytest

from service.engine.grammar import GrammarError, GrammarLimit, check_gbnf
from service.engine.schema import MAX_BYTES, MAX_CONTAINERS, MAX_DEPTH, MAX_ITEMS, check_schema
from service.engine.schema_gbnf import schema_to_gbnf


def refusal(schema: object) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        check_schema(schema if isinstance(schema, str) else json.dumps(schema))
    return caught.value


def nested(depth: int) -> str:
    return '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)


GOOD = [
    {},
    True,
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 500}}, "required": ["name"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 20},
    {"enum": [f"v{number}" for number in range(MAX_ITEMS)]},
    {"$schema": "http://json-schema.org/draft-07/schema#", "const": "é"},
    {"type": "string", "pattern": r"^[a-z\]]{2,5}\}(ab|c\])*$"},
    {"type": "string", "minLength": 1990, "maxLength": 2000},
    {"properties": {f"p{number}": {"type": "integer"} for number in range(200)}},
    {"properties": {chr(0x4E00 + number): {"type": "integer"} for number in range(100)}},
    json.loads(nested(MAX_DEPTH)),
]


@pytest.mark.parametrize("schema", GOOD, ids=range(len(GOOD)))
def test_good_schemas_pass_and_so_do_their_grammars(schema: dict[str, object] | bool) -> None:
    assert check_schema(json.dumps(schema)) == schema
    check_gbnf(schema_to_gbnf(schema))


BAD = [
    ({"type": "strin"}, "at /type: 'strin' is not valid"),
    (
        {"properties": {"a/b~c": {"minLength": -1}}},
        "at /properties/a~1b~0c/minLength: -1 is less than the minimum of 0",
    ),
    ({"anyOf": [{}, {"type": 5}]}, "at /anyOf/1/type: 5 is not valid"),
    ({"$schema": 5}, "at /$schema: this is not a string"),
    ({"items": {"$ref": "https://example.com/x"}}, "at /items/$ref: 'https://example.com/x' leaves the document"),
    ({"$dynamicRef": "other.json#x"}, "at /$dynamicRef: 'other.json#x' leaves the document"),
    ({"properties": {"\ud800": {"type": "\udc00"}}}, r"at /properties/\ud800/type: '\udc00' is not valid"),
    ({"x" * 1000: {"$ref": "a"}}, f"at /{'x' * 199}...: 'a' leaves the document"),
    ([], "a schema must be a JSON object, true or false"),
    ("5", "a schema must be a JSON object, true or false"),
    ('{"const": NaN}', "this is no JSON: NaN"),
    ('{"const": ' + "9" * 5000 + "}", "this is no JSON: NaN, Infinity, or a number with thousands of digits"),
]


@pytest.mark.parametrize(("schema", "message"), BAD, ids=range(len(BAD)))
def test_bad_schemas_are_refused_with_a_pointer_to_the_place(schema: object, message: str) -> None:
    error = refusal(schema)
    assert message in str(error)
    assert not isinstance(error, GrammarLimit)


def test_text_that_is_no_json_is_refused_with_line_and_column() -> None:
    error = refusal('{"a":\n 1,}')
    assert (error.line, error.column) == (2, 4)


LIMITS = [
    (" " * MAX_BYTES + "{}", "the text has 262146 bytes"),
    ("[" * 100_000, "nested deeper"),
    (nested(MAX_DEPTH + 1), "nested deeper"),
    ({"anyOf": [{}] * (MAX_ITEMS + 1)}, "the list has 1025 items"),
    ({"properties": {f"p{number}": {} for number in range(MAX_CONTAINERS)}}, "more than 2000 objects and lists"),
]


@pytest.mark.parametrize(("schema", "message"), LIMITS, ids=range(len(LIMITS)))
def test_what_is_too_large_is_refused(schema: object, message: str) -> None:
    error = refusal(schema)
    assert message in str(error)
    assert isinstance(error, GrammarLimit)
