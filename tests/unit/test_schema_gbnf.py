"""Grammars of JSON schemas: what they accept and refuse, as llama.cpp reads them, and what is generated under them."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import jsonschema
import llama_cpp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.engine.grammar import GrammarError, check_gbnf
from service.engine.schema import check_schema
from service.engine.schema_gbnf import schema_to_gbnf
from slotwire.v1 import generation_pb2 as pb
from slotwire.v1 import generation_pb2_grpc as pb_grpc
from slotwire.v1 import sampling_pb2 as sp
from tests.conftest import LIMIT, TINY

Schema = dict[str, Any]

# The library as a matcher


checked = functools.lru_cache(check_gbnf)


class Library:
    """llama.cpp's grammars over the tiny model's vocabulary."""

    def __init__(self) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(str(TINY).encode(), params)
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        self.end = llama_cpp.llama_vocab_eos(self.vocabulary)
        self.pieces = [self._piece(token) for token in range(self.size)]
        # the library takes any byte for the rest of a character that has begun
        self._whole = np.array([piece.decode(errors="ignore").encode() == piece for piece in self.pieces])
        self._one = llama_cpp.llama_token_data()
        self._all = np.zeros(self.size, np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
        self._all["id"] = np.arange(self.size)

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        size = llama_cpp.llama_token_to_piece(self.vocabulary, token, buffer, 256, 0, True)
        return buffer.raw[:size]

    def tokens(self, text: str) -> list[int]:
        data = text.encode()
        buffer = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self.vocabulary, data, len(data), buffer, len(buffer), False, False)
        tokens = list(buffer[:count])
        assert b"".join(self.pieces[token] for token in tokens) == data
        return tokens

    def grammar(self, gbnf: str) -> Any:
        checked(gbnf)
        sampler = llama_cpp.llama_sampler_init_grammar(self.vocabulary, gbnf.encode(), b"root")
        assert sampler, gbnf
        return sampler

    def allows(self, sampler: Any, token: int) -> bool:
        self._one.id, self._one.logit = token, 1.0
        array = llama_cpp.llama_token_data_array(data=ctypes.pointer(self._one), size=1, selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        return math.isfinite(self._one.logit)

    def accepts(self, gbnf: str, text: str) -> bool:
        sampler = self.grammar(gbnf)
        try:
            for token in self.tokens(text):
                if not self.allows(sampler, token):
                    return False
                llama_cpp.llama_sampler_accept(sampler, token)
            return self.allows(sampler, self.end)
        finally:
            llama_cpp.llama_sampler_free(sampler)

    def walk(self, gbnf: str, chance: random.Random, most: int) -> str | None:
        """A text by drawing among the allowed tokens, short ones first; None where it is not done after `most`."""
        sampler = self.grammar(gbnf)
        data = b""
        try:
            for _ in range(most):
                self._all["logit"] = 0
                pointer = self._all.ctypes.data_as(llama_cpp.llama_token_data_p)
                array = llama_cpp.llama_token_data_array(data=pointer, size=self.size, selected=-1, sorted=False)
                llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
                finite = np.isfinite(self._all["logit"])
                whole = finite & self._whole
                allowed = list(map(int, np.flatnonzero(whole if whole.any() else finite)))
                weights = [0.1 if token == self.end else 4.0 ** -len(self.pieces[token]) for token in allowed]
                token = chance.choices(allowed, weights)[0]
                if token == self.end:
                    return data.decode()
                llama_cpp.llama_sampler_accept(sampler, token)
                data += self.pieces[token]
            return None
        finally:
            llama_cpp.llama_sampler_free(sampler)


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    library = Library()
    yield library
    llama_cpp.llama_model_free(library.model)


def valid(schema: Schema | bool, value: object) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# Values that are valid and are accepted, that are not and are not, and that are valid and left out for models' sake


@dataclass(frozen=True)
class Case:
    schema: Schema
    accepted: Sequence[object]
    refused: Sequence[object] = ()
    left_out: Sequence[object] = ()


PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": ["string", "null"], "format": "email", "description": "an annotation"},
        "tags": {"type": "array", "items": {"enum": ["a", "ab", "b"]}, "maxItems": 2},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
        }
    },
}
SHAPES: Schema = {
    "oneOf": [{"$ref": "#/definitions/circle"}, {"$ref": "#/definitions/square"}, {"type": "null"}],
    "definitions": {
        "circle": {
            "type": "object",
            "properties": {"kind": {"const": "circle"}, "radius": {"type": "number"}},
            "required": ["kind", "radius"],
        },
        "square": {
            "type": "object",
            "properties": {"kind": {"const": "square"}, "side": {"type": "number", "exclusiveMinimum": 0}},
            "required": ["kind", "side"],
        },
    },
}
BASE: Schema = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}

CASES = {
    "anything": Case({}, [None, True, 1, -1.5, 1e30, "x", [], [1, ["a"]], {}, {"a": {"b": []}}, 'é😀\n"\\']),
    "anything, annotated": Case({"title": "t", "x-unit": "m", "default": 3, "$comment": "c"}, [1, "a", {}]),
    "string": Case({"type": "string"}, ["", 'a"b', "\\", "\n\t\b\x01", "é😀", "/"], [1, None, [], {}, True]),
    "lengths": Case(
        {"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc", "é😀", '"\\'], ["", "a", "abcd", "é"]
    ),
    "long": Case({"type": "string", "maxLength": 2000}, ["", "a" * 2000], ["a" * 2001]),
    "no length": Case({"type": "string", "maxLength": 0}, [""], ["a"]),
    "types": Case({"type": ["integer", "null", "boolean"]}, [1, None, False], [1.5, "a", [], {}], []),
    "integer": Case({"type": "integer"}, [0, 7, -7, 10**18 - 1], [1.5, "1", None], [10**18]),
    "number": Case({"type": "number"}, [0, -0.5, 1e22, 1.5e-7, 12345.678], ["1", None, True]),
    "integer of both": Case({"type": ["number", "integer"]}, [1, 1.5], ["a"]),
    "minimum": Case({"type": "integer", "minimum": 18}, [18, 19, 99, 100, 10**9], [17, 0, -18, 9, 1]),
    "maximum": Case({"type": "integer", "exclusiveMaximum": -5}, [-6, -10, -99], [-5, 0, 5, -4]),
    "broken bounds": Case({"type": "integer", "minimum": -1.5, "maximum": 2.5}, [-1, 0, 2], [-2, 3]),
    "number within": Case(
        {"type": "number", "minimum": 0, "maximum": 100}, [0, 0.5, 99.99, 100, 100.0], [-0.5, 100.5, 101, -1, 1000]
    ),
    "number between": Case(
        {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1}, [0, 0.001, -0.999], [1, -1, 1.0, 1.5, -1.5]
    ),
    "number above": Case({"type": "number", "exclusiveMinimum": 0}, [0.001, 1, 123.5, 10**9], [0, 0.0, -1, -0.5]),
    "constant": Case({"const": {"a": [1, "é\n", None], "b": {}}}, [{"a": [1, "é\n", None], "b": {}}], [{"a": []}, {}]),
    "quotes": Case(
        {"enum": ['say "hi"', "back\\slash", "a/b", "\x7f", "😀"]},
        ['say "hi"', "back\\slash", "a/b", "\x7f", "😀"],
        ["say", "hi"],
    ),
    "enum": Case(
        {"enum": ["red", "re", "r", 1, 1.5, None, [1]]}, ["red", "re", "r", 1, 1.5, None, [1]], ["", "ed", 2, []]
    ),
    "enum of a type": Case({"type": "string", "enum": ["a", 1, None], "maxLength": 1}, ["a"], [1, None, "b"]),
    "enum in a string": Case({"anyOf": [{"type": "string"}, {"enum": ["a", 1]}]}, ["a", "b", 1], [2]),
    "object": Case(
        PERSON,
        [
            {"name": "x", "tags": []},
            {"name": "x", "age": 150, "tags": ["ab"]},
            {"name": "x", "email": None, "tags": ["a", "b"]},
            {"name": "x", "age": 0, "email": "q", "tags": []},
        ],
        [
            {},
            {"name": "x"},
            {"tags": []},
            {"name": "", "tags": []},
            {"name": "x", "age": 151, "tags": []},
            {"name": "x", "tags": ["a", "b", "a"]},
            {"name": "x", "tags": [], "more": 1},
        ],
        [{"tags": [], "name": "x"}],
    ),
    "all optional": Case(
        {"properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}},
        [
            {},
            {"a": None},
            {"b": None},
            {"c": None},
            {"a": None, "b": None},
            {"a": None, "c": None},
            {"b": None, "c": None},
            {"a": None, "b": None, "c": None},
        ],
        [{"a": 1}, {"c": 1}],
        [{"d": 1}, {"b": None, "a": None}, 1, []],
    ),
    "some required": Case(
        {"properties": {"a": {}, "b": {}, "c": {}, "d": {}}, "required": ["b", "d"], "type": "object"},
        [{"b": 1, "d": 2}, {"a": 0, "b": 1, "d": 2}, {"b": 1, "c": 3, "d": 2}, {"a": 0, "b": 1, "c": 3, "d": 2}],
        [{"b": 1}, {"d": 1}, {"a": 1, "d": 1}, {"a": 0, "b": 1, "c": 2}, {}],
    ),
    "other names": Case(
        {
            "properties": {"ab": {"type": "null"}, "a": {"type": "null"}, '"': {"type": "null"}},
            "additionalProperties": {"type": "integer"},
        },
        [
            {},
            {"ab": None},
            {"x": 1},
            {"abc": 1, "": 2},
            {"ab": None, "a": None, "b": 1, "aa": 2},
            {"é": 1, "aé": 2},
            {'"': None},
        ],
        [{"ab": 1}, {"a": 1}, {"x": None}, {'"': 1}],
        [{"a\n": 1}],
    ),
    "free names": Case(
        {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2, "minProperties": 1},
        [{"a": True}, {"a": True, "b\n": False}],
        [{}, {"a": 1}, {"a": True, "b": True, "c": True}],
    ),
    "required of any": Case({"type": "object", "required": ["x"]}, [{"x": 1}, {"x": {}, "y": 2}], [{}, {"y": 1}]),
    "not empty": Case(
        {"properties": {"a": {}, "b": {}}, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{}]
    ),
    "false property": Case({"properties": {"a": False, "b": True}}, [{}, {"b": 1}], [{"a": 1}, {"a": 1, "b": 1}]),
    "items": Case(
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        [[1], [1, 2], [1, 2, 3]],
        [[], [1, 2, 3, 4], ["a"], [None]],
    ),
    "many items": Case({"items": {"const": 1}, "minItems": 5}, [[1] * 5, [1] * 100], [[1] * 4, []]),
    "exact items": Case({"items": {"const": 1}, "minItems": 3, "maxItems": 3}, [[1] * 3], [[1] * 2, [1] * 4]),
    "no items": Case({"type": "array", "items": False}, [[]], [[1]]),
    "tuple": Case(
        {"prefixItems": [{"type": "integer"}, {"type": "string"}, {"type": "null"}], "minItems": 2},
        [[1, "a"], [1, "a", None]],
        [[], [1], ["a"], [1, 2]],
        [[1, "a", None, 4]],
    ),
    "tuple and more": Case(
        {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "maxItems": 3},
        [[], [1], [1, "a"], [1, "a", "b"]],
        [["a"], [1, 2], [1, "a", "b", "c"]],
    ),
    "longer than its tuple": Case(
        {"prefixItems": [{"const": 1}], "minItems": 2}, [[1, "x"], [1, 2, 3]], [[1], [], [2, 2]]
    ),
    "recursive": Case(
        TREE,
        [
            {"value": 1},
            {"value": 1, "children": []},
            {"value": 1, "children": [{"value": 2}, {"value": 3, "children": [{"value": 4}]}]},
        ],
        [{}, {"value": 1, "children": [1]}, {"value": 1, "children": [{}]}],
    ),
    "root reference": Case({"type": "array", "items": {"$ref": "#"}}, [[], [[]], [[], [[[]], []]]], [1, [1], [[[1]]]]),
    "pointer": Case(
        {
            "properties": {"a/b": {"type": "null"}, "c": {"$ref": "#/properties/a~1b"}, "d": {"$ref": "#/x%20y/0"}},
            "x y": [{"const": 2}],
        },
        [{"c": None}, {"d": 2}],
        [{"c": 1}, {"d": None}],
    ),
    "union": Case(
        SHAPES,
        [None, {"kind": "circle", "radius": 1.5}, {"kind": "square", "side": 2}],
        [
            {"kind": "circle", "side": 2},
            {"kind": "square", "radius": 1},
            {"kind": "square", "side": 0},
            {"kind": "x"},
            1,
        ],
    ),
    "union beside": Case(
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": None}, {"b": None}, {"a": None, "b": None}],
        [{}, {"a": 1}],
    ),
    "both unions": Case(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "oneOf": [{"type": ["integer", "null"], "minimum": 5}, {"type": "string", "maxLength": 1}],
        },
        [5, 60, "", "a"],
        ["ab"],
        [],
    ),
    "merged": Case(
        {"allOf": [BASE, {"properties": {"id": {"minimum": 5}, "b": {"type": "null"}}}], "required": ["b"]},
        [{"id": 5, "b": None}],
        [{"id": 4, "b": None}, {"id": 5}, {"b": None}, {"id": 5.5, "b": None}],
    ),
    "reference and more": Case(
        {"properties": {"n": {"$ref": "#/$defs/n", "maximum": 9}}, "$defs": {"n": {"type": "integer", "minimum": 1}}},
        [{"n": 1}, {"n": 9}],
        [{"n": 0}, {"n": 10}, {"n": None}],
    ),
    "closed by another": Case(
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": {"type": "null"}}, {"properties": {"b": {}}}]},
        [{"a": 1}, {"b": None}, {"a": 1, "b": None, "c": None}],
        [{"b": 1}, {"c": 1}],
    ),
    "pattern": Case(
        {"type": "string", "pattern": r'^([A-Z]{2,3}-\d+|[a-f"\\]?é\.)$'},
        ["AB-1", "ABC-123", "é.", "aé.", '"é.', "\\é."],
        ["A-1", "ABCD-1", "AB-", "é", "éa", "gé.", "", 'AB"'],
    ),
    "pattern of the whole": Case({"pattern": "^a$|^b+$"}, ["a", "b", "bb"], ["", "ab", "aa"]),
    "pattern and length": Case(
        {"pattern": "^#[0-9a-f]+$", "minLength": 3, "maxLength": 4}, ["#01", "#abc"], ["#0", "#0123", "#xy"]
    ),
    "pattern with anything": Case(
        {"pattern": "^.[^a]$"}, ["xx", "\t\t", "😀é", '"\\', "b\n"], ["xa", "\nb", "x", "xxx"]
    ),
    "date": Case(
        {"format": "date"},
        ["2024-02-29", "1999-12-31", "2000-02-29"],
        [],
        ["2023-02-29", "2024-13-01", "1900-02-29", "24-1-1", "2024-04-31"],
    ),
    "time": Case(
        {"type": "string", "format": "time"},
        ["23:59:59Z", "00:00:00.125+02:00"],
        [1],
        ["24:00:00Z", "12:00:00", "1:00:00Z"],
    ),
    "date-time": Case(
        {"type": "string", "format": "date-time"}, ["2024-02-29T01:02:03Z"], [1], ["2024-02-29", "2024-02-30T01:02:03Z"]
    ),
    "uuid": Case(
        {"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], [], ["123e4567-e89b-12d3-a456-42661417400"]
    ),
    "draft 7 tuple": Case(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": [{"const": 1}],
            "additionalItems": {"const": 2},
        },
        [[], [1], [1, 2, 2]],
        [[2], [1, 1]],
    ),
    "branches that are one": Case(
        {"anyOf": [{"type": "array"}, {"type": "array", "maxItems": 1}, {"items": {"const": 1}}]},
        [[], [1], [1, "a"]],
        [],
        [1],
    ),
    "impossible branch": Case(
        {"anyOf": [False, {"type": "integer", "minimum": 2, "maximum": 1}, {"const": 1}]}, [1], [2]
    ),
    "endless branch": Case(
        {"anyOf": [{"type": "object", "properties": {"x": {"$ref": "#/anyOf/0"}}, "required": ["x"]}, {"const": 1}]},
        [1],
        [{}, {"x": 1}],
    ),
    "void keywords": Case(
        {
            "uniqueItems": False,
            "patternProperties": {},
            "then": {"const": 1},
            "minContains": 2,
            "unevaluatedProperties": True,
        },
        [1, [1, 1], {"a": 1}],
    ),
}


def converted(schema: Schema | bool) -> str:
    return schema_to_gbnf(check_schema(json.dumps(schema)))


@pytest.mark.parametrize("name", CASES)
def test_valid_values_are_accepted_and_others_are_not(name: str, library: Library) -> None:
    case = CASES[name]
    kind = jsonschema.validators.validator_for(case.schema, default=jsonschema.Draft202012Validator)
    validator = kind(case.schema)
    gbnf = converted(case.schema)
    for value in case.accepted:
        assert validator.is_valid(value), value
        for text in (compact(value), json.dumps(value, ensure_ascii=False)):
            assert library.accepts(gbnf, text), (text, gbnf)
        assert not library.accepts(gbnf, compact(value) + " ")
    for value in case.refused:
        assert not validator.is_valid(value), value
    for value in [*case.refused, *case.left_out]:
        assert not library.accepts(gbnf, compact(value)), (value, gbnf)


def test_strings_have_their_escapes_and_no_halves_of_surrogates(library: Library) -> None:
    gbnf = converted({"type": "string", "minLength": 2, "maxLength": 2})
    for text in (r"\"\\", r"\/\b", r"\f\n", r"\r\t", r"\u00e9\u0000", r"\ud83d\ude00a", r"\uD83D\uDE00\ud7ff"):
        assert len(json.loads(f'"{text}"')) == 2
        assert library.accepts(gbnf, f'"{text}"'), text
    for text in (r"\ud83d\ude00", r"\ud83da", r"a\ude00", r"\x41a", r"\u12", "a\n", "a\x7f", '""'):
        assert not library.accepts(gbnf, f'"{text}"'), text


def test_lone_surrogates_in_names_and_constants_are_written_as_escapes(library: Library) -> None:
    gbnf = schema_to_gbnf(check_schema(r'{"properties": {"\ud800": {"const": "\udc00x"}}, "required": ["\ud800"]}'))
    assert library.accepts(gbnf, r'{"\ud800": "\udc00x"}')


def test_a_boolean_is_a_schema(library: Library) -> None:
    assert library.accepts(converted(True), '{"a": [1]}')
    with pytest.raises(GrammarError, match="no value is valid"):
        converted(False)


# What cannot be expressed

REFUSED = {
    "uniqueItems": ({"items": {"uniqueItems": True}}, "at /items/uniqueItems: 'uniqueItems' cannot be expressed"),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, "at /multipleOf: 'multipleOf' cannot"),
    "not": ({"properties": {"a": {"not": {}}}}, "at /properties/a/not: 'not' cannot"),
    "if": ({"if": {}, "then": False}, "at /if: 'if' cannot"),
    "patternProperties": ({"patternProperties": {"^a": {}}}, "at /patternProperties: "),
    "propertyNames": ({"propertyNames": {"maxLength": 3}}, "at /propertyNames: "),
    "contains": ({"contains": {"const": 1}}, "at /contains: "),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, "at /dependentRequired: "),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, "at /unevaluatedProperties: "),
    "dynamic reference": ({"$dynamicRef": "#x"}, "at /$dynamicRef: "),
    "in a branch": ({"anyOf": [{"const": 1}, {"contains": {}}]}, "at /anyOf/1/contains: "),
    "in a target": ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"not": {}}}}, "at /$defs/a/not: "),
    "with a reference": ({"items": {"$ref": "#/$defs/a", "not": {}}, "$defs": {"a": {}}}, "at /items/not: "),
    "anchor": ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "at /$ref: '#a' is not supported"),
    "nowhere": ({"items": {"$ref": "#/$defs/b"}}, "at /items/$ref: '#/$defs/b' points nowhere"),
    "no schema": ({"$ref": "#/x", "x": 5}, "at /x: this is not a schema"),
    "no keyword": ({"$ref": "#/x", "x": {"type": 5}}, "at /x/type: this is not a string"),
    "no count": ({"$ref": "#/x", "x": {"type": "string", "maxLength": -1}}, "at /x/maxLength: this is not a whole"),
    "no list": ({"$ref": "#/x", "x": {"enum": 5}}, "at /x/enum: this is not a list"),
    "other base": (
        {"$defs": {"a": {"$id": "http://x/y", "items": {"$ref": "#"}}}, "items": {"$ref": "#/$defs/a"}},
        "at /$defs/a/items/$ref: a reference inside",
    ),
    "itself": ({"$ref": "#"}, "refers back to itself"),
    "itself in a union": ({"anyOf": [{"$ref": "#"}, {"const": 1}]}, "refers back to itself"),
    "itself in allOf": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        "refers back to itself",
    ),
    "endless": ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no value is valid"),
    "empty range": ({"type": "integer", "minimum": 2, "maximum": 1}, "no value is valid"),
    "no type left": ({"type": "string", "allOf": [{"type": "integer"}]}, "no value is valid"),
    "no value left": ({"type": "string", "enum": [1, 2]}, "no value is valid"),
    "long string": (
        {"items": {"type": "string", "maxLength": 2001}},
        "at /items/maxLength: 2001 is more than a grammar can count to; at most 2000",
    ),
    "many items": ({"type": "array", "minItems": 1e300}, "at /minItems: 1"),
    "number bound": ({"type": "number", "minimum": 0.5}, "at /minimum: a bound of numbers that are no integers"),
    "huge bound": ({"type": "integer", "maximum": 1e300}, "at /maximum: a bound can have at most 40 digits"),
    "infinite bound": ('{"type": "integer", "maximum": 1e999}', "at /maximum: this is not a number"),
    "infinite constant": ('{"const": 1e999}', "a listed value is an infinite number"),
    "boolean bound": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 1,
            "exclusiveMinimum": True,
        },
        "at /exclusiveMinimum: this is not a number",
    ),
    "enum of patterns": ({"enum": ["a"], "pattern": "^a$"}, "at /pattern: 'pattern' together with enum"),
    "two patterns": ({"pattern": "^a$", "allOf": [{"pattern": "^b$"}]}, "at /pattern: more than one pattern"),
    "two properties at least": ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, "at /minProperties: "),
    "few of many": ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "at /maxProperties: "),
    "combinations": (
        {
            "allOf": [
                {"anyOf": [{"maxLength": n} for n in range(50)]},
                {"anyOf": [{"minLength": n} for n in range(50)]},
                {"anyOf": [{"minimum": n} for n in range(50)]},
            ]
        },
        "combinations of its alternatives",
    ),
    "many names": (
        {"properties": {f"{n:099}": {} for n in range(50)}, "additionalProperties": True},
        "have 4950 characters; at most 4096",
    ),
    "unanchored": ({"pattern": "abc"}, "at /pattern: expected '^'"),
    "half anchored": ({"pattern": "^a|b$"}, "at /pattern: expected '$'"),
    "lookahead": ({"pattern": "^(?=a)b$"}, "at /pattern: lookaround"),
    "lookbehind": ({"pattern": "^b(?<!a)$"}, "at /pattern: lookaround"),
    "back reference": ({"pattern": r"^(a)\1$"}, r"at /pattern: \1 cannot"),
    "word boundary": ({"pattern": r"^a\b$"}, r"at /pattern: \b cannot"),
    "property of Unicode": ({"pattern": r"^\p{L}$"}, r"at /pattern: \p cannot"),
    "stray bracket": ({"pattern": "^a]$"}, "at /pattern: ']' closes nothing; write \\], at character 3"),
    "open group": ({"pattern": "^(a$"}, "at /pattern: "),
    "many times": ({"pattern": "^a{3000}$"}, "at most 2000 repetitions"),
    "length of a pattern": ({"pattern": "^a*b*$", "maxLength": 3}, "at /pattern: it cannot be combined"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_constrains_and_cannot_be_expressed_is_refused_with_its_place(name: str) -> None:
    schema, message = REFUSED[name]
    with pytest.raises(GrammarError) as caught:
        schema_to_gbnf(check_schema(schema if isinstance(schema, str) else json.dumps(schema)))
    assert message in str(caught.value)


# How large and how ambiguous grammars are


def test_a_bound_is_one_repetition_and_alternatives_share_what_they_begin_with() -> None:
    gbnf = converted({"anyOf": [{"enum": ["green", "grey", "great"]}, {"type": "string", "pattern": "^[A-Z]{2,500}$"}]})
    assert gbnf == 'root ::= "\\"" ("gre" ("en\\"" | "y\\"" | "at\\"") | [A-Z]{2,500} "\\"")\n'


def test_optional_properties_make_a_rule_each() -> None:
    names = [f"p{number}" for number in range(200)]
    gbnf = converted(
        {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names[::3]}
    )
    check_gbnf(gbnf)
    assert len(gbnf) < 30_000
    assert len(gbnf.splitlines()) < 150


def test_equal_places_share_a_rule() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x", "y"]}
    gbnf = converted({"type": "object", "properties": {f"p{n}": dict(point) for n in range(9)}, "required": ["p0"]})
    assert gbnf.count('\\"x\\":') == 1


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value {number}" for number in range(1000)]},
        {"enum": ["a" * number for number in range(400)]},
        {"properties": {f"p{number}": {} for number in range(200)}},
        {"items": {"anyOf": [{"properties": {"k": {"const": n}, f"x{n}": {}}, "required": ["k"]} for n in range(200)]}},
        {"properties": {f"p{number}": {} for number in range(200)}, "additionalProperties": True},
        {"type": "array", "items": {"type": "string", "maxLength": 2000}, "maxItems": 2000},
        {
            "$ref": "#/$defs/0",
            "$defs": {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(300)} | {"300": {}},
        },
    ],
    ids=range(7),
)
def test_large_schemas_make_grammars_that_the_library_can_use(schema: Schema, library: Library) -> None:
    assert library.walk(converted(schema), random.Random(1), 2) is None


# Numbers


def test_integer_ranges_are_exact() -> None:
    def matcher(low: int | None, high: int | None) -> Callable[[str], object]:
        bounds = {key: bound for key, bound in (("minimum", low), ("maximum", high)) if bound is not None}
        rules = schema_to_gbnf({"type": "integer", **bounds}).splitlines()
        assert len(rules) == 1, rules
        return re.compile(re.sub('[" ]', "", rules[0].removeprefix("root ::= "))).fullmatch

    for low in range(-12, 13):
        for high in range(low, 13):
            matches = matcher(low, high)
            assert [n for n in range(-24, 25) if matches(str(n))] == list(range(low, high + 1)), (low, high)
            assert not matches("-0")
            assert not matches("00")
    chance = random.Random(3)
    for _ in range(150):
        low, high = sorted(chance.randrange(-(10**digits), 10**digits) for digits in chance.choices(range(1, 20), k=2))
        matches, below, above = matcher(low, high), matcher(None, high), matcher(low, None)
        near = [bound + step for bound in (low, high, 0, 10, 99, 1000, -1000) for step in (-2, -1, 0, 1, 2)]
        for number in [*near, *(chance.randrange(2 * low - 9, 2 * abs(high) + 9) for _ in range(9))]:
            assert bool(matches(str(number))) == (low <= number <= high), (low, high, number)
            assert bool(below(str(number))) == (number <= high) or abs(number) > 10**18
            assert bool(above(str(number))) == (low <= number) or abs(number) > 10**18


@pytest.mark.parametrize("low", [None, -12, -1, 0, 7])
@pytest.mark.parametrize("high", [None, -10, 0, 8, 120])
@pytest.mark.parametrize("names", [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
def test_number_ranges_are_exact(low: int | None, high: int | None, names: tuple[str, str], library: Library) -> None:
    schema = {"type": "number"} | {
        name: bound for name, bound in zip(names, (low, high), strict=True) if bound is not None
    }
    near = {bound + step for bound in (-12, -10, 0, 7, 100) for step in (-1, -0.5, -0.001, 0, 0.001, 0.5, 1)}
    wanted = {number for number in near if valid(schema, number)}
    if not wanted:
        with pytest.raises(GrammarError):
            converted(schema)
        return
    gbnf = converted(schema)
    assert {number for number in near if library.accepts(gbnf, compact(number))} == wanted


# Random schemas


def schemas() -> st.SearchStrategy[Schema]:
    """Small schemas without contradictions that have instances."""
    text = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=4)
    numbers = st.integers(-200, 200)
    scalars: list[st.SearchStrategy[Schema]] = [
        st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, numbers, numbers),
        st.builds(lambda a: {"type": "number", "exclusiveMinimum": a}, numbers),
        st.builds(
            lambda a, b: {"type": "string", "minLength": min(a, b), "maxLength": a + b}, *[st.integers(0, 4)] * 2
        ),
        st.builds(
            lambda values: {"enum": values}, st.lists(st.one_of(text, numbers, st.none()), min_size=1, max_size=4)
        ),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"type": "string"}, {}]),
        st.sampled_from([{"type": "string", "pattern": "^[a-c]+(-\\d{2})?$"}, {"type": ["integer", "null"]}]),
    ]

    def containers(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
        properties = st.dictionaries(text, inner, max_size=4)
        objects = st.builds(
            lambda properties, required, more: {
                "type": "object",
                "properties": properties,
                "required": [name for name, is_required in zip(properties, required, strict=False) if is_required],
                "additionalProperties": more,
            },
            properties,
            st.lists(st.booleans(), min_size=4, max_size=4),
            st.one_of(st.booleans(), inner),
        )
        arrays = st.builds(
            lambda head, items, a, b: (
                {
                    "type": "array",
                    "items": items,
                    "minItems": min(a, b),
                    "maxItems": a + b,
                }
                | ({"prefixItems": head} if head else {})
            ),
            st.lists(inner, max_size=2),
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        )
        unions = st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=3))
        return st.one_of(objects, arrays, unions)

    return st.recursive(st.one_of(scalars), containers, max_leaves=6)


def instance(schema: Schema | bool, chance: random.Random) -> Any:
    """A value that is valid and that the grammar does not leave out."""
    if schema is True or not schema:
        return chance.choice([None, True, 12, -0.25, "é", [1, "a"], {"k": []}])
    assert isinstance(schema, dict)
    if "anyOf" in schema:
        return instance(chance.choice(schema["anyOf"]), chance)
    if "enum" in schema:
        return chance.choice(schema["enum"])
    if "pattern" in schema:
        return chance.choice(["a", "cab", "b-07", "aaa-99"])
    match schema["type"]:
        case "integer":
            return chance.randint(schema["minimum"], schema["maximum"])
        case "number":
            return schema.get("exclusiveMinimum", -3) + chance.choice([0.5, 1, 2.25, 1000])
        case "string":
            length = chance.randint(schema.get("minLength", 0), schema.get("maxLength", 5))
            return "".join(chance.choice('ab "\\\n/é😀\x00') for _ in range(length))
        case "boolean":
            return chance.random() < 0.5
        case "null":
            return None
        case "array":
            length = chance.randint(schema["minItems"], schema["maxItems"])
            head = schema.get("prefixItems", [])
            return [instance(head[i] if i < len(head) else schema["items"], chance) for i in range(length)]
        case "object":
            wanted = [name for name in schema["properties"] if name in schema["required"] or chance.random() < 0.5]
            found = {name: instance(schema["properties"][name], chance) for name in wanted}
            others = [name for name in ("k", "kk") if name not in schema["properties"] and chance.random() < 0.5]
            more = schema["additionalProperties"]
            return found | {name: instance(more, chance) for name in others if more is not False}
    return chance.choice([None, 7])


def mutated(text: str, chance: random.Random) -> str:
    for _ in range(chance.choice([1, 1, 2])):
        at = chance.randrange(len(text) + 1)
        put = chance.choice(
            ['"', ",", ":", "0", "1", "-", ".", "a", "[", "]", "{", "}", "null", '"k":1,', "", "", "é", "\\", " "]
        )
        text = text[:at] + put + text[at + chance.choice([0, 0, 1, 1, 3]) :]
    return text


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_random_schemas_and_the_validator_agree(schema: Schema, seed: int, library: Library) -> None:
    chance = random.Random(seed)
    gbnf = converted(schema)
    for _ in range(3):
        value = instance(schema, chance)
        assert valid(schema, value), value
        text = compact(value)
        assert library.accepts(gbnf, text), (text, gbnf)
        assert library.accepts(gbnf, json.dumps(value, ensure_ascii=False)), (text, gbnf)
        for _ in range(4):
            changed = mutated(text, chance)
            if library.accepts(gbnf, changed):
                assert valid(schema, json.loads(changed)), (changed, gbnf)
    walked = library.walk(gbnf, chance, 30)
    assert walked is None or valid(schema, json.loads(walked)), (walked, gbnf)


@pytest.mark.parametrize("name", CASES)
def test_what_is_drawn_at_random_is_valid(name: str, library: Library) -> None:
    schema = CASES[name].schema
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    chance = random.Random(name)
    gbnf = converted(schema)
    for _ in range(3):
        text = library.walk(gbnf, chance, 30)
        assert text is None or validator.is_valid(json.loads(text)), text


KEYWORDS = {
    "type",
    "enum",
    "const",
    "$ref",
    "allOf",
    "anyOf",
    "properties",
    "required",
    "additionalProperties",
    "$id",
} | {"items", "prefixItems", "minItems", "maxLength", "pattern", "format", "minimum"}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-3, 10**20),
            st.floats(),
            st.text(max_size=3),
            st.sampled_from(["string", "object", "#", "#/items", "^a+$"]),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(sorted(KEYWORDS)), inner, max_size=4),
        ),
        max_leaves=10,
    ).filter(lambda value: isinstance(value, dict))
)
def test_no_schema_fails_but_by_refusal(schema: Any) -> None:
    try:
        gbnf = schema_to_gbnf(schema)
    except GrammarError:
        return
    check_gbnf(gbnf)


# Generated


BOUNDED: list[Schema] = [
    PERSON
    | {
        "properties": PERSON["properties"]
        | {"name": {"type": "string", "minLength": 1, "maxLength": 12}, "email": {"type": "null"}}
    },
    {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": "n"}, "n": {"type": "number", "minimum": 0, "maximum": 1}},
                    "required": ["kind", "n"],
                },
                {
                    "type": "object",
                    "properties": {"kind": {"const": "d"}, "d": {"type": "string", "format": "date"}},
                    "required": ["kind", "d"],
                },
            ]
        },
    },
    {"type": "string", "pattern": "^[A-Z][a-z]{0,8}( [A-Z][a-z]{0,8}){0,2}$"},
]


@pytest.mark.parametrize("schema", BOUNDED, ids=range(len(BOUNDED)))
async def test_what_the_model_generates_is_valid(schema: Schema, channel: grpc.aio.Channel) -> None:
    stub: pb_grpc.GenerationServiceAsyncStub = pb_grpc.GenerationServiceStub(channel)  # type: ignore[assignment]
    grammar = sp.Grammar(json_schema=json.dumps(schema))
    prompt = pb.Prompt(text=pb.TextPrompt(text="The :func:`json.loads` function returns"))

    async def generate(options: sp.SamplingOptions) -> None:
        request = pb.GenerateRequest(prompt=prompt, sampling=options, max_tokens=250)
        responses = [response async for response in stub.Generate(request, timeout=LIMIT)]
        assert responses[-1].finished.reason == pb.FINISH_REASON_END_OF_TEXT
        text = "".join(response.delta.text for response in responses)
        assert valid(schema, json.loads(text)), text

    sampled = [sp.SamplingOptions(seed=seed, temperature=1.0, grammar=grammar) for seed in range(20)]
    await asyncio.gather(*map(generate, [sp.SamplingOptions(temperature=0, grammar=grammar), *sampled]))
