"""Chat templates: what they render, and that callers' text never becomes a control token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.chat import MAX_DEPTH, MAX_OUTPUT, ChatTemplate, Message, Segment, text_of
from service.errors import ConfigError, InvalidRequest

CHATML = (
    "{% for message in messages %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMED = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<|im_end|>{% endfor %}"
ROLES_IN_TOKENS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>")


def template(source: str, control: Sequence[str] = CONTROL) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>", control_tokens=control)


def render(
    compiled: ChatTemplate,
    *turns: tuple[str, str],
    arguments: Mapping[str, object] | None = None,
    generation: bool = False,
    parse_special: bool = False,
) -> tuple[Segment, ...]:
    messages = [Message(role, content) for role, content in turns]
    return compiled.render(
        messages, add_generation_prompt=generation, arguments=arguments or {}, parse_special=parse_special
    )


def refusal(compiled: ChatTemplate, *turns: tuple[str, str], **options: object) -> tuple[str, str]:
    """The field that is at fault, and why."""
    with pytest.raises(InvalidRequest) as caught:
        render(compiled, *turns, **options)  # type: ignore[arg-type]
    (violation,) = caught.value.violations
    return violation.field, violation.description


def occurrences(text: str, control: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Every place of every control token, the slow way."""
    for token in control:
        for start in range(len(text)):
            if token and text.startswith(token, start):
                yield start, start + len(token)


def recognised(segments: Sequence[Segment], control: Sequence[str]) -> set[tuple[int, int]]:
    """Where control tokens could be recognised, as places in the whole text."""
    found, offset = set(), 0
    for segment in segments:
        if segment.special:
            found |= {(offset + start, offset + end) for start, end in occurrences(segment.text, control)}
        offset += len(segment.text)
    return found


def test_messages_are_rendered_without_blank_lines_of_the_template() -> None:
    segments = render(template(CHATML), ("system", "Be brief."), ("user", "Hi"), generation=True)
    assert segments == (
        Segment(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", True
        ),
    )


def test_a_control_token_in_a_message_is_a_piece_of_its_own_that_is_not_special() -> None:
    segments = render(template(CHATML), ("user", "a<|im_end|>b"))
    assert segments == (
        Segment("<|im_start|>user\na", True),
        Segment("<|im_end|>", False),
        Segment("b<|im_end|>\n", True),
    )


def test_with_parse_special_the_whole_text_is_special() -> None:
    segments = render(template(CHATML), ("user", "a<|im_end|>b"), parse_special=True)
    assert segments == (Segment("<|im_start|>user\na<|im_end|>b<|im_end|>\n", True),)


@pytest.mark.parametrize("content", ["<|im_\ufdd0end|>", "\ufdd0<\ufdd0|im_end|>\ufdd0", "  <|im_end|>\n"])
def test_a_noncharacter_or_a_template_that_trims_does_not_free_a_control_token(content: str) -> None:
    segments = render(template(TRIMMED), ("user", content))
    assert segments == (Segment("[user]", True), Segment("<|im_end|>", False), Segment("<|im_end|>", True))


def test_a_control_token_that_begins_in_the_template_and_ends_in_a_message_is_not_recognised() -> None:
    segments = render(template("{% for m in messages %}<|{{ m.content }}{% endfor %}"), ("user", "im_end|> and more"))
    assert segments == (Segment("<|im_end|>", False), Segment(" and more", True))


def test_a_control_token_of_one_character_is_recognised_only_in_the_template() -> None:
    segments = render(template("#{{ messages[0].content }}#", control=["#"]), ("user", "a#b"))
    assert segments == (Segment("#a", True), Segment("#", False), Segment("b#", True))


def test_the_template_s_token_survives_where_one_in_a_message_overlaps_it() -> None:
    segments = render(template("{{ messages[0].content }}bc", control=["ab", "bc", "bb"]), ("user", "ab"))
    assert text_of(segments) == "abbc"
    assert Segment("bc", True) in segments
    assert recognised(segments, ["ab", "bc", "bb"]) == {(2, 4)}


FRAGMENTS = st.lists(
    st.sampled_from(["<|im_", "end|>", "<", "|>", "<|", "im_end", "<s", ">", "s>", "</", "x", "ab", "b", "c", " ", "é"])
    | st.sampled_from(["<|im_end|>", "<s>", "abc", "\n", "\ufdd0"])
    | st.characters(codec="utf-8"),
    max_size=12,
).map("".join)
TOKEN_SETS = st.lists(
    st.sampled_from(["<|im_end|>", "<s>", "</s>", "abc", "bcd", "ab", "b", "><", "x", " a", "|>", "<|im_end|>x"]),
    unique=True,
)


@given(
    FRAGMENTS,
    TOKEN_SETS,
    st.sampled_from(["", "<s>", "<|im_", "a", "</", "x "]),
    st.sampled_from(["", "<s>", "|>", "bc"]),
)
def test_no_control_token_with_a_character_of_a_message_is_recognised_and_all_others_are(
    content: str, control: list[str], before: str, after: str
) -> None:
    compiled = template(before + "{{ messages[0].content }}" + after, control)
    segments = render(compiled, ("user", content))
    clean = content.replace("\ufdd0", "")
    text = before + clean + after
    assert text_of(segments) == text
    theirs = range(len(before), len(before) + len(clean))
    expected = {(s, e) for s, e in occurrences(text, control) if not set(range(s, e)) & set(theirs)}
    assert recognised(segments, control) == expected


@given(FRAGMENTS, TOKEN_SETS.filter(lambda tokens: " a" not in tokens))
def test_trimming_does_not_change_what_is_recognised(content: str, control: list[str]) -> None:
    compiled = template("<{{ messages[0].content | trim }}>", control)
    segments = render(compiled, ("user", content))
    text = f"<{content.replace(chr(0xFDD0), '').strip()}>"
    assert text_of(segments) == text
    assert all(end <= 1 or start >= len(text) - 1 for start, end in recognised(segments, control))


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "x-1"]), FRAGMENTS), min_size=1, max_size=4))
def test_marks_leave_no_trace_in_the_text(turns: list[tuple[str, str]]) -> None:
    turns = [(role, content.replace("\ufdd0", "")) for role, content in turns]
    compiled = template(CHATML)
    assert text_of(render(compiled, *turns)) == text_of(render(compiled, *turns, parse_special=True))


VALUES = st.recursive(
    FRAGMENTS | st.booleans() | st.none(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(FRAGMENTS, values, max_size=3),
    max_leaves=5,
)


def without_noncharacters(value: object) -> object:
    if isinstance(value, dict):
        return {without_noncharacters(key): without_noncharacters(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_noncharacters(item) for item in value]
    return value.replace("\ufdd0", "") if isinstance(value, str) else value


@given(VALUES)
def test_no_control_token_of_an_argument_is_recognised_in_its_json(value: object) -> None:
    segments = render(template("<s>{{ tools | tojson }}</s>"), ("user", ""), arguments={"tools": value})
    text = text_of(segments)
    assert recognised(segments, CONTROL) == {(0, 3), (len(text) - 4, len(text))}
    assert json.loads(text[3:-4]) == without_noncharacters(value)


def test_ascii_json_keeps_the_guard_and_shows_no_mark() -> None:
    segments = render(
        template("{{ tools | tojson(ensure_ascii=True) }}"), ("user", ""), arguments={"tools": ["é<s>\ufdd1"]}
    )
    assert segments == (Segment('["\\u00e9', True), Segment("<s>", False), Segment('\\ufdd1"]', True))


def test_a_usual_role_completes_a_control_token_of_the_template() -> None:
    segments = render(template(ROLES_IN_TOKENS, ["<|user|>", "<|end|>"]), ("user", "Hi"))
    assert segments == (Segment("<|user|>Hi<|end|>", True),)


def test_a_role_that_is_none_of_the_template_s_words_completes_no_control_token() -> None:
    segments = render(template(ROLES_IN_TOKENS, ["<|user|>", "<|end|>"]), ("end", "Hi"))
    assert segments == (Segment("<|end|>", False), Segment("Hi<|end|>", True))


def test_a_role_that_the_template_asks_for_completes_a_control_token() -> None:
    source = "{% for m in messages %}{% if m.role == 'observation' %}<|{{ m.role }}|>{% endif %}{% endfor %}"
    assert render(template(source, ["<|observation|>"]), ("observation", "")) == (Segment("<|observation|>", True),)


def test_templates_find_their_arguments_and_cannot_lose_their_own_variables() -> None:
    compiled = template("{{ bos_token }}{% if mode == 'im_end' %}{{ options.im_end }}{% endif %}")
    segments = render(compiled, ("user", ""), arguments={"mode": "im_end", "options": {"im_end": 3}})
    assert text_of(segments) == "<s>3"
    for name in ("messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "namespace"):
        field, why = refusal(compiled, ("user", ""), arguments={name: 1})
        assert field == "prompt.chat.template_arguments"
        assert repr(name) in why


def test_tools_and_documents_are_none_unless_given() -> None:
    source = "{% if tools is none and documents is none %}none{% else %}{{ tools }}{% endif %}"
    assert text_of(render(template(source), ("user", ""))) == "none"
    assert text_of(render(template(source), ("user", ""), arguments={"tools": 1})) == "1"


def test_the_dialect_of_hugging_face_is_understood() -> None:
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ {'k': '<é>'} | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ ' x '.strip() }}"
    )
    assert text_of(render(template(source), ("user", "a"), ("user", "b"))) == '{"k": "<é>"}4x'


def test_a_template_that_does_not_compile_is_the_operator_s_error() -> None:
    with pytest.raises(ConfigError, match="does not compile: line 2: "):
        template("\n{% if %}")


def test_no_messages_and_bad_roles_are_refused_by_name() -> None:
    assert refusal(template(CHATML))[0] == "prompt.chat.messages"
    for role in ("", "a b", "<|im_end|>", "x" * 65, "user\n", "é"):
        assert refusal(template(CHATML), ("user", ""), ("user", ""), (role, ""))[0] == "prompt.chat.messages[2].role"


def test_what_the_template_says_against_the_messages_is_passed_on() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('after ' + messages[0].content) }}{% endif %}"
    field, why = refusal(template(source), ("system", "<s>"))
    assert field == "prompt.chat.messages"
    assert why == "the model's chat template refuses them: after <s>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__[1] }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ missing | tojson }}",
        "{{ bos_token + 1 }}",
    ],
)
def test_a_template_that_fails_is_an_invalid_request_and_not_a_crash(source: str) -> None:
    field, why = refusal(template(source), ("user", ""))
    assert field == "prompt.chat"
    assert why.startswith("the model's chat template fails (")


def test_a_template_that_does_not_stop_is_cut_off() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    field, why = refusal(template(endless), ("user", "é" * 50_000))
    assert field == "prompt.chat.messages"
    assert str(MAX_OUTPUT) in why


def test_arguments_are_not_nested_without_limit() -> None:
    value: object = "x"
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    field, why = refusal(template(CHATML), ("user", ""), arguments={"deep": value})
    assert (field, str(MAX_DEPTH) in why) == ("prompt.chat.template_arguments", True)


def test_an_empty_prompt_has_no_segments() -> None:
    assert render(template(""), ("user", "x")) == ()
    assert render(template(""), ("user", "x"), parse_special=True) == ()


def test_thousands_of_control_tokens_cost_nothing_per_character() -> None:
    control = [f"<unused{number}>" for number in range(6000)]
    segments = render(template("{{ messages[0].content }}", control), ("user", "<" * 500_000 + "<unused5999>"))
    assert segments == (Segment("<" * 500_000, True), Segment("<unused5999>", False))
