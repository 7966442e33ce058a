"""From a request as its caller wrote it to one that the engine can run: rendered, tokenized, with a sampler.

This is the work that takes time but needs no decode. It is thread-safe, so that it stays off the event loop and off
the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from service.engine.batch import MakeSampler, Sampler
from service.engine.chat import ChatTemplate, Message, Segment
from service.engine.grammar import GrammarError, check_gbnf, check_schema
from service.engine.schema_gbnf import schema_to_gbnf
from service.engine.settings import Grammars
from service.engine.types import ModelInfo, Paused, Request
from service.errors import Conflict, FieldViolation, InvalidRequest


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special: bool = True
    parse_special: bool = False


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    parse_special: bool = False
    arguments: Mapping[str, object] = field(default_factory=dict)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Draft:
    """A request whose prompt and grammar are still as the caller wrote them; `request.tokens` is empty."""

    request: Request
    prompt: Prompt
    gbnf: str | None = None
    json_schema: str | None = None


class Vocabulary(Protocol):
    """What is needed of the model's vocabulary."""

    size: int
    longest_piece: int

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...
    def check(self, field: str, tokens: Sequence[int]) -> None: ...


class Intake:
    """Prepares requests for one loaded model."""

    def __init__(
        self,
        info: ModelInfo,
        vocabulary: Vocabulary,
        template: ChatTemplate | None,
        make_sampler: MakeSampler,
        grammars: Grammars = "all",
    ) -> None:
        self._info = info
        self._grammars = grammars
        self._vocabulary = vocabulary
        self._template = template
        self._make_sampler = make_sampler

    @property
    def can_chat(self) -> bool:
        """Whether chat prompts can be rendered."""
        return self._template is not None

    def prepare(self, draft: Draft) -> tuple[Request, Sampler]:
        """The request with its tokens, and its sampler, which the caller has to close or hand over.

        Raises InvalidRequest (prompt too long, unknown tokens, bad grammar) or Conflict (no chat template).
        """
        tokens = self.tokens(draft.prompt)
        limit = self._info.slot_context - 1  # one place for the first generated token
        if len(tokens) > limit:
            raise _too_long(f"{len(tokens)} tokens", limit, tokens=len(tokens))
        self._vocabulary.check("sampling.logit_bias", sorted(draft.request.sampling.logit_bias))
        sampling = replace(draft.request.sampling, grammar=self._grammar(draft))
        request = replace(draft.request, tokens=tuple(tokens), sampling=sampling)
        return request, self._make_sampler(request)

    def resume(self, paused: Paused) -> tuple[Request, Sampler]:
        """The request of a generation that came from elsewhere, with a sampler in the middle of its text.

        All of it is checked as if a client had sent it. Raises InvalidRequest or Conflict.
        """
        request, generated = paused.request, paused.generated
        sampling = request.sampling
        self._vocabulary.check("resume.tokens", (*request.tokens, *generated))
        self._vocabulary.check("resume.sampling.logit_bias", sorted(sampling.logit_bias))
        if sampling.mirostat is not None or sampling.xtc.probability > 0:
            raise _not_resumable("what mirostat and XTC know cannot be carried over")
        if request.max_tokens is not None and len(generated) >= request.max_tokens:
            raise _not_resumable(f"{len(generated)} tokens were generated of {request.max_tokens}")
        if paused.draws > 2 * len(generated):
            raise _not_resumable(f"{paused.draws} draws for {len(generated)} tokens")
        if len(request.tokens) + len(generated) > self._info.slot_context:
            raise _not_resumable(f"its text is longer than the slot's context of {self._info.slot_context} tokens")
        if sampling.grammar is not None:
            self._check_gbnf(sampling.grammar, "resume.sampling.grammar")
        sampler = self._make_sampler(request)
        try:
            sampler.resume(generated, paused.draws)
        except BaseException:
            sampler.close()
            raise
        return request, sampler

    def tokens(self, prompt: Prompt) -> Sequence[int]:
        """The prompt as tokens; at least one."""
        match prompt:
            case TokenPrompt(ids):
                self._vocabulary.check("prompt.tokens.ids", ids)
                tokens: Sequence[int] = ids
            case TextPrompt(text, add_special, parse_special):
                self._check_length(text)
                tokens = self._vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)
            case ChatPrompt():
                tokens = self.tokenize_segments(self.render(prompt))
        if not tokens:
            raise InvalidRequest(FieldViolation("prompt", "has no tokens; at least 1"))
        return tokens

    def render(self, prompt: ChatPrompt) -> tuple[Segment, ...]:
        """The conversation in the model's own words, in pieces that may or may not contain control tokens."""
        if self._template is None:
            raise Conflict("the model has no chat template; send text or tokens", reason="NO_CHAT_TEMPLATE")
        return self._template.render(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            arguments=prompt.arguments,
            parse_special=prompt.parse_special,
        )

    def tokenize_segments(self, segments: Sequence[Segment]) -> list[int]:
        """The template writes the opening tokens itself, so none are added."""
        self._check_length("".join(segment.text for segment in segments))
        return [
            token
            for segment in segments
            for token in self._vocabulary.tokenize(segment.text, add_special=False, parse_special=segment.special)
        ]

    def _check_length(self, text: str) -> None:
        """Refuse a text that cannot fit without tokenizing it, which would take long."""
        limit = self._info.slot_context - 1
        fewest = len(text.encode("utf-8", "surrogatepass")) // self._vocabulary.longest_piece
        if fewest > limit:
            raise _too_long(f"at least {fewest} tokens", limit, tokens=fewest)

    def _grammar(self, draft: Draft) -> str | None:
        if draft.json_schema is not None:
            if self._grammars == "none":
                raise _forbidden("JSON schemas", self._grammars)
            return _grammar_of_schema(draft.json_schema)
        if draft.gbnf is not None:
            self._check_gbnf(draft.gbnf, "sampling.grammar.gbnf")
        return draft.gbnf

    def _check_gbnf(self, gbnf: str, field: str) -> None:
        if self._grammars != "all":
            raise _forbidden("GBNF grammars", self._grammars)
        try:
            check_gbnf(gbnf)
        except GrammarError as error:
            raise _bad_grammar(field, error) from None


def _not_resumable(why: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation("resume", why), reason="NOT_RESUMABLE")


def _forbidden(what: str, setting: Grammars) -> Conflict:
    return Conflict(f"this server takes no {what} (grammars = {setting})", reason="GRAMMARS_OFF")


def _grammar_of_schema(text: str) -> str:
    try:
        gbnf = schema_to_gbnf(check_schema(text))
    except GrammarError as error:
        raise _bad_grammar("sampling.grammar.json_schema", error) from None
    try:
        check_gbnf(gbnf)
    except GrammarError as error:  # a limit; the place in a text that the caller never saw would not help
        error = GrammarError(f"the grammar that this schema makes is too large: {error.message}")
        raise _bad_grammar("sampling.grammar.json_schema", error) from None
    return gbnf


def _too_long(count: str, limit: int, *, tokens: int) -> InvalidRequest:
    return InvalidRequest(
        FieldViolation("prompt", f"has {count}; the slot's context has room for {limit}"),
        reason="PROMPT_TOO_LONG",
        tokens=tokens,
        limit=limit,
    )


def _bad_grammar(field: str, error: GrammarError) -> InvalidRequest:
    place = {"line": error.line, "column": error.column} if error.line else {}
    return InvalidRequest(FieldViolation(field, str(error)), reason="INVALID_GRAMMAR", **place)
