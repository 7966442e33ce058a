"""Chat messages to text, with the jinja2 template that the model carries.

The dialect is that of `apply_chat_template` in Hugging Face's transformers: a sandbox, blocks that leave no blank
lines, `break` and `continue`, `{% generation %}`, and the functions `raise_exception` and `strftime_now`. A template
comes with a model that the operator chose; the messages and arguments come from anyone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as loop_controls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service.engine.fence import MARK, Fence, Segment
from service.errors import ConfigError, FieldViolation, InvalidRequest

__all__ = ["ChatTemplate", "Message", "Segment", "text_of"]

MAX_OUTPUT = 8 * 1024 * 1024
"""UTF-8 bytes of a rendered prompt."""
MAX_DEPTH = 64
"""Of objects and lists in one another in template arguments."""

_MESSAGES = "prompt.chat.messages"
_ARGUMENTS = "prompt.chat.template_arguments"
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FOREIGN = re.compile(f"[^\0-\x7f{MARK}]")
"""What JSON in ASCII escapes; the marks have to stay."""
_USUAL_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_OWN_VARIABLES = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})
_SHOWN = 500


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `role` is as the template knows it: usually `system`, `user`, `assistant` or `tool`."""

    role: str
    content: str


def text_of(segments: Sequence[Segment]) -> str:
    """The whole text."""
    return "".join(segment.text for segment in segments)


class ChatTemplate:
    """A compiled template. Immutable, so any thread may use it."""

    def __init__(self, source: str, *, bos: str, eos: str, control_tokens: Sequence[str]) -> None:
        """`control_tokens` are all texts that become tokens of their own where control tokens are recognised.

        Raises ConfigError if `source` does not compile.
        """
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except Exception as error:  # jinja2's own errors, and Python's for code that it cannot nest that deeply
            raise ConfigError(f"the model's chat template does not compile: {_describe(error)}") from error
        self._words = _USUAL_ROLES | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self._reserved = _OWN_VARIABLES | environment.globals.keys()
        self._variables = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        self._fence = Fence(control_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, object],
        parse_special: bool,
    ) -> tuple[Segment, ...]:
        """The prompt in consecutive pieces; those that are not `special` must be tokenized without control tokens.

        Unless `parse_special`, no control token is recognised that has a character of a message or an argument in
        it. This holds if the template inserts these texts whole, trimmed or as JSON; and where it inserts parts, for
        the control tokens that are complete in the text. One thing is left to the template: a role or argument that
        is one of its own words (a string constant in it, or a usual role) may complete a control token, as in
        `<|{{ message.role }}|>`. U+FDD0, which is no character, is removed from messages and arguments; a template
        that compares or measures a text that holds (a piece of) a control token may find another one in there.

        Raises InvalidRequest if messages or arguments are no good, the template refuses them or fails, or the text
        is longer than MAX_OUTPUT. The time that a template takes is its own affair.
        """
        self._check(messages, arguments)
        if parse_special:
            turns = [{"role": message.role, "content": message.content} for message in messages]
            extra = dict(arguments)
        else:
            turns = [
                {
                    "role": self._fence.mark(m.role, ends=m.role not in self._words),
                    "content": self._fence.mark(m.content),
                }
                for m in messages
            ]
            extra = {name: self._marked(value) for name, value in arguments.items()}
        turn = {"messages": turns, "add_generation_prompt": add_generation_prompt}
        text = self._generate({**self._variables, **extra, **turn})
        if parse_special:
            return (Segment(text, special=True),) if text else ()
        return self._fence.split(text)

    def _check(self, messages: Sequence[Message], arguments: Mapping[str, object]) -> None:
        if not messages:
            raise _invalid(_MESSAGES, "there must be at least one message")
        for index, message in enumerate(messages):
            if not _ROLE.fullmatch(message.role):
                raise _invalid(f"{_MESSAGES}[{index}].role", "a role is 1 to 64 ASCII letters, digits, '_', '.' or '-'")
        if taken := sorted(arguments.keys() & self._reserved):
            raise _invalid(_ARGUMENTS, f"the template's own {', '.join(map(repr, taken))} cannot be replaced")

    def _marked(self, value: object, depth: int = 0) -> object:
        """A copy of an argument with its strings marked. Keys keep their ends, so that the template finds them."""
        if depth > MAX_DEPTH:
            raise _invalid(_ARGUMENTS, f"values are nested deeper than {MAX_DEPTH}")
        if isinstance(value, str):
            return self._fence.mark(value, ends=value not in self._words)
        if isinstance(value, Mapping):
            return {
                self._fence.mark(str(key), ends=False): self._marked(item, depth + 1) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._marked(item, depth + 1) for item in value]
        return value

    def _generate(self, variables: Mapping[str, object]) -> str:
        pieces = []
        size = 0
        for piece in self._pieces(variables):
            size += len(piece.encode("utf-8", "surrogatepass"))
            if size > MAX_OUTPUT:
                raise _invalid(_MESSAGES, f"the rendered text is longer than {MAX_OUTPUT} bytes")
            pieces.append(piece)
        return "".join(pieces)

    def _pieces(self, variables: Mapping[str, object]) -> Iterator[str]:
        try:
            yield from self._template.generate(variables)
        except _Refusal as error:
            raise _invalid(_MESSAGES, f"the model's chat template refuses them: {_describe(error)}") from error
        except Exception as error:  # a template is a program: it can raise anything
            kind = type(error).__name__
            raise _invalid("prompt.chat", f"the model's chat template fails ({kind}): {_describe(error)}") from error


def _invalid(field: str, description: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field, description))


def _describe(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    return (f"line {line}: " if line else "") + Fence.unmark(str(error))[:_SHOWN]


class _Refusal(TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, by which templates show a trainer what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loop_controls]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, nothing is escaped for HTML."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _FOREIGN.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
