"""A conversation that remembers what was said."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Unpack

from slotwire_client.generation import Generation
from slotwire_client.types import ChatMessage, GenerateOptions, GenerationResult

Send = Callable[[Sequence[ChatMessage], GenerateOptions, Callable[[GenerationResult], None]], Generation]
"""How a chat starts a generation: the messages, the options, and what to call with the result."""


class Chat:
    """Messages and the session that keeps them on one slot. Made by `Client.chat`.

    Attributes:
        session: The session's name on the server.
        messages: What was said so far. It may be changed between two answers.
    """

    def __init__(self, send: Send, session: str | None = None, system: str | None = None) -> None:
        self._send = send
        self.session = session or uuid.uuid4().hex
        self.messages: list[ChatMessage] = [] if system is None else [ChatMessage("system", system)]

    def send(self, text: str, **options: Unpack[GenerateOptions]) -> Generation:
        """Asks for the answer to `text`. Read one answer to its end before you send the next message.

        Both messages join the conversation when the answer has ended; an answer that fails or is stopped changes
        nothing. Raises as `Client.generate` does.
        """
        question = ChatMessage("user", text)

        def keep(result: GenerationResult) -> None:
            self.messages += [question, ChatMessage("assistant", result.text)]

        return self._send([*self.messages, question], {"session": self.session, **options}, keep)
