"""The check of GBNF: where it complains, what it bounds, and that llama.cpp agrees with it."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from service.engine.grammar import MAX_NESTING, GrammarError, GrammarLimit, check_gbnf
from service.engine.grammar_graph import ALTERNATIVE, MAX_BRANCHES, find_problem, terminal
from service.engine.grammar_text import MAX_BYTES, MAX_CLASS, MAX_NAME

TINY = Path(__file__).parents[1] / "models" / "tiny-hybrid.Q8_0.gguf"
TOKENS = {"<|bos|>", "<|eos|>"}

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws # a comment
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
GOOD = [
    ARITHMETIC,
    JSON,
    'root ::= "a"',
    "root ::=",
    "root::=.",
    "# c\n\nroot ::=\n\n  # c\n  [a-z] # c\n",
    'root ::= "a" |\n "b"\r\n\rb ::= root',
    'root ::= ("a"\n|\n"b"\n)\n',
    'root ::= ("a"*)* "x"',
    "root ::= (ws item?)*\nws ::= [ ]*\nitem ::= [a-z]+",
    "root ::= []",
    "root ::= [^] | [a-] | [-] | [--a] | [^-] | [a-b-c] | [\\]\\[\\-\\\\]",
    'root ::= "\\x41\\u00e9\\U0001F600 é😀\\n\\r\\t\\\\\\"\\[\\]\\-"',
    'root ::= "a"{3} "b"{2,} "c"{0,4} "d"{ 1 , 2 } "e"{0}',
    'root ::= "a"{44}{45}',
    'root ::= ("a" "b"{2}){1000}',
    'root ::= "a"{2000} ("b" | "c"){0,1000}',
    "root ::= <|bos|> !<|eos|> <[5]>* !<[4294967295]>?",
    'root ::= a\nroot ::= "x"',
    'root ::= "x" root | "y" a\na ::= b? c\nb ::= "" | "z"\nc ::= [0-9] root',
    "-9 ::= .\nroot ::= -9",
    "root ::= " + "(" * 500 + '"a"' + ")" * 500,
    'root ::= "x" ' + "(" * 250 + '"a"' + ")?" * 250,
    "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in range(500)) + "a500 ::= .",
    'root ::= ("a"?){0,17}',
    'root ::= "x" ' + '"a"? ' * 16 + '"b"',
    "root ::= " + "|".join(f'"{n}"' for n in range(500)),
    'root ::= "' + "é" * 100_000 + '"',
]
BAD = [
    # text, line, column, message
    ("# nothing", 0, 0, "there is no rule 'root'"),
    ('a ::= "x"', 0, 0, "there is no rule 'root'"),
    ('root ::= "x"\n= "y"', 2, 1, "expected the name of a rule"),
    ("root = .", 1, 6, "expected '::='"),
    ("root ::= .\na b ::= .", 2, 3, "expected '::='"),
    ("root ::= . ;", 1, 12, "expected an item, '|' or the end of the line"),
    ("root ::= a ::= root\na ::= .", 1, 12, "expected an item, '|' or the end of the line"),
    ("root ::= . )", 1, 12, "expected an item, '|' or the end of the line"),
    ("root ::= é", 1, 10, "expected an item, '|' or the end of the line"),
    ('root ::= ("a"\n  ;', 2, 3, "expected ')'"),
    ('root ::= ("a"', 1, 14, "expected ')'"),
    ('root ::= é"', 1, 10, "expected an item"),
    ('root ::= "é" "abc', 1, 14, "the string is not closed"),
    ("root ::= [abc", 1, 10, "expected ']'"),
    ("root ::= [a-", 1, 10, "expected ']'"),
    ('root ::= "\\q"', 1, 11, "unknown escape"),
    ('root ::= "\\', 1, 11, "unknown escape"),
    ('root ::= "\\x4"', 1, 13, "\\x needs 2 hexadecimal digits"),
    ('root ::= "\\u12"', 1, 13, "\\u needs 4 hexadecimal digits"),
    ("root ::= *", 1, 10, "nothing in front"),
    ('root ::= "a" | +', 1, 16, "nothing in front"),
    ('root ::= ""?', 1, 12, "nothing in front"),
    ('root ::= "a"{0}{1}', 1, 16, "nothing in front"),
    ('root ::= "a"{', 1, 14, "expected a number"),
    ('root ::= "a"{,3}', 1, 14, "expected a number"),
    ('root ::= "a"{3', 1, 15, "expected '}'"),
    ('root ::= "a"{3,x}', 1, 16, "expected '}'"),
    ('root ::= "a"{99999999999999999999}', 1, 14, "the number is too large"),
    ('root ::= "a"{2001}', 1, 13, "2001 repetitions; at most 2000"),
    ('root ::= "a"{45}{45}', 1, 17, "are 2025; at most 2000"),
    (
        "root ::= " + "(" * 400 + "a" + ")?" * 400 + "{20}\na ::= .",
        1,
        1211,
        "repetitions times rules to repeat are 16000",
    ),
    ("root ::= !x", 1, 11, "expected '<'"),
    ("root ::= <[x]>", 1, 12, "expected a number"),
    ("root ::= <[1>", 1, 13, "expected ']'"),
    ("root ::= <[1] >", 1, 14, "expected '>'"),
    ("root ::= <[4294967296]>", 1, 12, "the token id is too large"),
    ("root ::= <|bos|", 1, 10, "the token is not closed"),
    ("root ::= !<nope>", 1, 10, "'<nope>' is not a token of the model"),
    ('root ::= "x" (a |\n b)\na ::= .', 2, 2, "rule 'b' is not defined"),
    ('root ::= b\nroot ::= ("a")', 1, 10, "rule 'b' is not defined"),
    ('root ::= root "a" | "b"', 1, 1, "rule 'root' begins with itself"),
    ("x ::= .\nroot ::= a\na ::= b | x\nb ::= (x | a)", 3, 1, "rule 'a' begins with itself"),
    ('root ::= "a"? root "x"', 1, 1, "rule 'root' begins with itself"),
    ('root ::= "a"*+', 1, 14, "what is repeated here begins with itself"),
]
LIMITS = [
    # what llama.cpp would accept, or die of
    ("#" * (MAX_BYTES + 1), 0, 0, "at most 262144"),
    ("root ::= .\0", 1, 11, "U+0000"),
    ("root ::= .\n# \ud800", 2, 3, "U+D800"),
    ("r" * (MAX_NAME + 1) + " ::= .", 1, 1, "at most 1024"),
    ("root ::= " + "(" * (MAX_NESTING + 1), 1, 10 + MAX_NESTING, "nested deeper than 512"),
    ("root ::= [" + "a" * (MAX_CLASS + 1) + "]", 1, 10, "at most 1024"),
    ("root ::= [az-a]", 1, 12, "the range ends before it begins"),
    ('root ::= "\\U00110000"', 1, 11, "U+110000 is no character"),
    ('root ::= "a\\x00"', 1, 12, "no token spells U+0000"),
    ('root ::= "\\ud83d\\ude00"', 1, 11, "no token spells U+D83D"),
    ('root ::= "a"{5,2}', 1, 13, "the maximum 2 is not in [5, 2000]"),
    ('root ::= "a"{5,2001}', 1, 13, "the maximum 2001 is not in [5, 2000]"),
    ('root ::= "' + "a" * 1000 + '"{500}', 1, 1012, "more than 262144 elements"),
    ("root ::= " + '"a"?' * 40_000, 1, 131081, "more than 32768 rules"),
    ('root ::= a root "z" | "x"\na ::= b\nb ::= "" | "y"', 1, 1, "where what stands in front is empty"),
    ('root ::= a root\na ::= b\nb ::= ""', 1, 1, "never comes to any text"),
    (
        "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1} | a{n + 1}\n" for n in range(40)) + "a40 ::= .",
        22,
        1,
        "too many ways",
    ),
    ("root ::= " + "|".join(f'"{n}"' for n in range(MAX_BRANCHES)), 1, 1, "more than 512 ways"),
    ("root ::= b\nb ::= " + '"a"? ' * 17 + '"b"', 2, 1, "rule 'b' has more than 16 items in a row that may be empty"),
    (
        'root ::= "x" b b "y"\nb ::= ([a-z]*){0,9}',
        1,
        1,
        "rule 'root' has more than 16 items in a row that may be empty",
    ),
]


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Any]:
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(TINY).encode(), params)
    yield llama_cpp.llama_model_get_vocab(model)
    llama_cpp.llama_model_free(model)


@pytest.fixture(scope="module")
def library(vocabulary: Any) -> Callable[[str], bool]:
    """Whether llama.cpp takes a grammar."""

    def accepts(text: str) -> bool:
        sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, text.encode(), b"root")
        if sampler:
            llama_cpp.llama_sampler_free(sampler)
        return bool(sampler)

    return accepts


def refusal(text: str) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        check_gbnf(text, is_token=TOKENS.__contains__)
    return caught.value


@pytest.mark.parametrize("text", GOOD, ids=range(len(GOOD)))
def test_good_grammars_pass_here_and_in_the_library(text: str, library: Callable[[str], bool]) -> None:
    check_gbnf(text, is_token=TOKENS.__contains__)
    assert library(text)


@pytest.mark.parametrize(("text", "line", "column", "message"), BAD, ids=range(len(BAD)))
def test_bad_grammars_are_refused_with_their_place_and_by_the_library(
    text: str, line: int, column: int, message: str, library: Callable[[str], bool]
) -> None:
    error = refusal(text)
    assert (error.line, error.column) == (line, column)
    assert message in error.message
    assert str(error) == (f"line {line}, column {column}: {error.message}" if line else error.message)
    assert not isinstance(error, GrammarLimit)
    assert not library(text)


@pytest.mark.parametrize(("text", "line", "column", "message"), LIMITS, ids=range(len(LIMITS)))
def test_what_the_library_does_not_survive_is_refused_before_it_sees_it(
    text: str, line: int, column: int, message: str
) -> None:
    error = refusal(text)
    assert isinstance(error, GrammarLimit)
    assert (error.line, error.column) == (line, column)
    assert message in error.message


AT_THE_LIMITS = [
    'root ::= ("x"?){0,17}',
    'root ::= (" "?){0,16} "x"',
    "root ::= " + "[ -z]? " * 16 + '"~"',
    "root ::= a a\na ::= " + '" "? ' * 8,
    "root ::= " + "|".join(f'. "{n}"' for n in range(500)),
    "root ::= a a\na ::= " + "|".join(f'"{chr(97 + n % 26)}{chr(97 + n * 7 % 26)}"' for n in range(500)),
]


@pytest.mark.parametrize("text", AT_THE_LIMITS, ids=range(len(AT_THE_LIMITS)))
def test_grammars_at_the_limits_take_a_moment_for_all_tokens(text: str, vocabulary: Any) -> None:
    check_gbnf(text)
    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, text.encode(), b"root")
    size = llama_cpp.llama_vocab_n_tokens(vocabulary)
    tokens = (llama_cpp.llama_token_data * size)(*((token, 1.0, 0.0) for token in range(size)))
    array = llama_cpp.llama_token_data_array(data=tokens, size=size, selected=-1, sorted=False)
    began = time.thread_time()
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    spent = time.thread_time() - began
    llama_cpp.llama_sampler_free(sampler)
    assert spent < 0.5


def test_an_empty_text_is_no_grammar_though_the_library_takes_it_for_none_at_all(
    library: Callable[[str], bool],
) -> None:
    assert refusal("").message == "there is no rule 'root'"
    assert library("")


def test_without_a_vocabulary_any_token_text_passes() -> None:
    check_gbnf("root ::= <nope>")


PIECES = [
    *' \n|()*+?"[]^-\\<>!.#{},09é',
    "{2}",
    "{0,3}",
    "{3,}",
    "::=",
    "root",
    "b",
    '"x"',
    '""',
    "[a-z]",
    "\\x41",
    "|\n",
]
SEEDS = [
    ARITHMETIC,
    JSON,
    'root ::= ("a"*)* b{2,3}\nb ::= [a-z]+ | c\nc ::= "1"{2}{3} | "2"{1,} | ( "q"\n | "r" )\n',
    'root ::= a b? c{0,5} # x\na ::= "\\x41\\u00e9\\n" | \n b\nb ::= ("x" | "y" (c | d)?)+\nc ::= [^a-z\\]\\-] .\n'
    'd ::= "" | a "k"\n',
]


def mutated(text: str, chance: random.Random) -> str:
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        at = chance.randrange(len(text) + 1)
        cut = chance.choice([0, 0, 1, 1, 3])
        begin = chance.randrange(len(text))
        put = chance.choice([chance.choice(PIECES), "", text[begin : begin + chance.randrange(12)]])
        text = text[:at] + put + text[at + cut :]
    return text


def test_the_library_agrees_about_mutated_grammars(library: Callable[[str], bool]) -> None:
    chance = random.Random(7)
    verdicts = {"accepted": 0, "refused": 0, "limited": 0}
    for _ in range(600):
        text = mutated(chance.choice(SEEDS), chance)
        try:
            check_gbnf(text, is_token=TOKENS.__contains__)
            verdict = "accepted"
        except GrammarLimit:
            verdict = "limited"
        except GrammarError:
            verdict = "refused"
        verdicts[verdict] += 1
        if verdict != "limited":
            assert library(text) == (verdict == "accepted"), text
    assert min(verdicts["accepted"], verdicts["refused"]) > 50


def random_grammar(chance: random.Random) -> str:
    """Four rules that refer to each other at random, most of them valid or left-recursive."""

    def item(depth: int) -> str:
        kind = chance.random()
        if kind < 0.5:
            text = chance.choice(['"x"', '"yz"', "[a-c]", "."])
        elif kind < 0.8 or depth > 1:
            text = chance.choice(["root", "a", "b", "c"])
        else:
            text = f"({alternatives(depth + 1)})"
        return text + chance.choice(["", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}"])

    def alternatives(depth: int) -> str:
        sizes = [chance.choice([0, 1, 1, 2, 3]) for _ in range(chance.choice([1, 2, 2]))]
        return " | ".join(" ".join(item(depth) for _ in range(size)) or '""' for size in sizes)

    return "\n".join(f"{name} ::= {alternatives(0)}" for name in ("root", "a", "b", "c"))


def test_the_library_agrees_about_left_recursion(library: Callable[[str], bool]) -> None:
    chance = random.Random(11)
    accepted = 0
    for _ in range(800):
        text = random_grammar(chance)
        try:
            check_gbnf(text)
        except GrammarLimit:
            continue
        except GrammarError as error:
            assert "begins with itself" in error.message  # noqa: PT017
            assert not library(text), text
        else:
            accepted += 1
            assert library(text), text
    assert 100 < accepted < 700


def test_recursion_that_replaces_itself_on_the_stack_is_no_problem() -> None:
    body, empty = [1, 0, ALTERNATIVE], [2, ALTERNATIVE, terminal(1)]
    assert find_problem([body, empty, [ALTERNATIVE]]) is None


def test_recursion_that_leaves_something_on_the_stack_is_a_limit_or_left_recursion() -> None:
    grows = find_problem([[1, 0, terminal(1)], [2], [ALTERNATIVE, terminal(1)]])
    assert grows is not None
    assert grows.limit
    seen_by_the_library = find_problem([[1, 0, terminal(1)], [ALTERNATIVE, terminal(1)]])
    assert seen_by_the_library is not None
    assert not seen_by_the_library.limit
