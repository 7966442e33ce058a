"""The check of JSON schemas: what it refuses, where it says so, and that it keeps the converter within bounds."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from llama_cpp.llama_grammar import json_schema_to_gbnf

from service.engine.grammar import GrammarError, GrammarLimit, check_gbnf
from service.engine.schema import (
    MAX_BYTES,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_OPTIONAL,
    MAX_PATTERN,
    check_schema,
)


def refusal(schema: object) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        check_schema(schema if isinstance(schema, str) else json.dumps(schema))
    return caught.value


def definitions(count: int, form: str, references: Iterable[str]) -> dict[str, object]:
    """Each definition refers twice to the next one; `form` makes their names."""
    last = form.format(count)
    schemas: dict[str, object] = {last: {"type": "string"}}
    for number in range(count):
        target = {"$ref": f"#/$defs/{form.format(number + 1)}"}
        schemas[form.format(number)] = {"properties": dict.fromkeys(references, target)}
    return {"properties": {"first": {"$ref": f"#/$defs/{form.format(0)}"}}, "$defs": schemas}


GOOD = [
    {},
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": MAX_OPTIONAL}}, "required": ["name"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 20},
    {"enum": [f"v{number}" for number in range(MAX_ITEMS)]},
    {"$schema": "http://json-schema.org/draft-07/schema#", "const": "é"},
    {"type": "string", "pattern": r"^[a-z\]]{2,5}\}(ab|c\])*$"},
    {"type": "string", "minLength": 1990, "maxLength": 2000},
    {"properties": {f"p{number}": {"type": "integer"} for number in range(200)}},
    {"properties": {chr(0x4E00 + number): {"type": "integer"} for number in range(100)}},
    definitions(20, "d{}", "ab"),
]


@pytest.mark.parametrize("schema", GOOD, ids=range(len(GOOD)))
def test_good_schemas_pass_and_what_the_converter_makes_of_them_passes_too(schema: dict[str, object]) -> None:
    text = json.dumps(schema)
    assert check_schema(text) == schema
    check_gbnf(json_schema_to_gbnf(text))


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
    ({"$defs": {"a": {"$ref": "#/$defs/b"}}}, "at /$defs/a/$ref: '#/$defs/b' points nowhere"),
    ({"type": "string", "pattern": "^a]$"}, "at /pattern: ']' at character 3 closes nothing"),
    ({"default": {"pattern": "^a{2}}$"}}, "at /default/pattern: '}' at character 6 closes nothing"),
    ([], "a schema must be a JSON object"),
    ("true", "a schema must be a JSON object"),
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


def nested(depth: int) -> str:
    return '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)


LIMITS = [
    (" " * MAX_BYTES + "{}", "the text has 262146 bytes"),
    ("[" * 100_000, "nested deeper"),
    (nested(MAX_DEPTH + 1), "nested deeper"),
    ({"anyOf": [{}] * (MAX_ITEMS + 1)}, "the list has 1025 items"),
    ({"properties": {f"p{number}": {} for number in range(MAX_CONTAINERS)}}, "more than 2000 objects and lists"),
    ({"pattern": f"^{'a' * MAX_PATTERN}$"}, "the pattern has 2050 characters"),
    ({"type": "string", "maxLength": MAX_OPTIONAL + 1}, "at /maxLength: this is more than 500 above minLength"),
    ({"pattern": "^a{2,600}$"}, "at /pattern: {2,600} spans more than 500 repetitions"),
    ({"type": "string", "minLength": 10**9}, "the repetitions are too many"),
    ({"type": "array", "items": {}, "minItems": 1e300, "maxItems": 1e300}, "the repetitions are too many"),
    ({"pattern": "^a{1_000_000_000}$"}, "the repetitions are too many"),
    ({"pattern": "^[a]{999999999,}$"}, "the repetitions are too many"),
    (definitions(25, "d_{}", "ab"), "with its references followed the schema has more than 2000 objects"),
    (definitions(25, "x/string", "ab") | {"x": {}}, "points nowhere"),
    ({"properties": {chr(0x4E00 + number): {} for number in range(300)}}, "names are not only ASCII"),
]


@pytest.mark.parametrize(("schema", "message"), LIMITS, ids=range(len(LIMITS)))
def test_what_would_keep_the_converter_busy_is_refused(schema: object, message: str) -> None:
    assert message in str(refusal(schema))


def test_references_that_the_converter_does_not_remember_are_counted_each_time() -> None:
    reserved: dict[str, object] = {"d20": {"string": {"type": "string"}}}
    for number in range(20):
        target = {"$ref": f"#/d{number + 1}/string"}
        reserved[f"d{number}"] = {"string": {"properties": {"a": target, "b": target}}}
    assert isinstance(refusal({"$ref": "#/d0/string", **reserved}), GrammarLimit)

    parts: dict[str, object] = {"d20": {}}
    for number in range(20):
        part = {"$ref": f"#/$defs/d{number + 1}"}
        parts[f"d{number}"] = {"properties": {"a": {"allOf": [part, {"anyOf": [part]}]}}}
    assert isinstance(refusal({"$ref": "#/$defs/d0", "$defs": parts}), GrammarLimit)


def test_a_recursive_schema_is_no_problem_and_one_that_is_part_of_itself_is() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    check_schema(json.dumps({"$ref": "#/$defs/node", "$defs": {"node": node}}))
    endless = {"properties": {"next": {"allOf": [{"$ref": "#/$defs/node"}]}}}
    assert isinstance(refusal({"$ref": "#/$defs/node", "$defs": {"node": endless}}), GrammarLimit)
