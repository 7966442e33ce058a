"""The client: one channel to one server, and a method for each thing that it can do."""

# A `timeout` here is the deadline that gRPC sends to the server, so that both sides stop; asyncio.timeout would not.
# ruff: noqa: ASYNC109

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from slotwire.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    slot_pb2,
    slot_pb2_grpc,
    snapshot_pb2_grpc,
    system_pb2,
    system_pb2_grpc,
)
from slotwire_client import decode, encode, state
from slotwire_client.chat import Chat
from slotwire_client.errors import NotFound, Unavailable, rpc_errors
from slotwire_client.generation import Generation
from slotwire_client.info import Load, ModelInfo, ServerInfo, ServerState
from slotwire_client.snapshots import Snapshots
from slotwire_client.types import (
    ChatMessage,
    GenerateOptions,
    GenerationResult,
    Prompt,
    RenderedChat,
    Slot,
    Token,
)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

# As much as the server takes unless it was told otherwise; gRPC's own limit for what a client takes is 4 MiB.
_DEFAULT_OPTIONS = (("grpc.max_receive_message_length", 16 << 20),)

_HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
# grpc.health.v1.HealthCheckResponse with the status SERVING: field 1, varint 1.
_SERVING = b"\x08\x01"


class Client:
    """A connection to a Slotwire server. Make it inside a running event loop, and close it or use `async with`.

    Args:
        target: Where the server is: `host:port`, `[::1]:port` or `unix:/path`.
        credentials: For TLS. Left out: an insecure channel.
        token: Sent with each call as a bearer token.
        channel_options: Options of the gRPC channel, which win over the client's own.

    Every call raises a SlotwireError of the class that fits the server's answer, and takes a `timeout` in seconds,
    after which it raises DeadlineExceeded.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        channel_options: Sequence[tuple[str, str | int]] = (),
    ) -> None:
        self.target = target
        options = tuple({**dict(_DEFAULT_OPTIONS), **dict(channel_options)}.items())
        self._channel = (
            grpc.aio.insecure_channel(target, options=options)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options=options)
        )
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._slots = slot_pb2_grpc.SlotServiceStub(self._channel)
        self._system = system_pb2_grpc.SystemServiceStub(self._channel)
        self.snapshots = Snapshots(snapshot_pb2_grpc.SnapshotServiceStub(self._channel), self._call)
        """Slot images by name, in the server's own store."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what is running and closes the channel."""
        await self._channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Starts a generation; see GenerateOptions for what it can be told.

        Raises:
            ValueError: an option does not fit the prompt, or a value does not fit the contract.
            TypeError: an option is unknown or has the wrong type.
        """
        return self._generate(prompt, options)

    def chat(self, session: str | None = None, system: str | None = None) -> Chat:
        """A new conversation, with a session of its own unless one is named, and a system message where one is."""
        return Chat(self._generate, session, system)

    async def tokenize(
        self,
        text: str | bytes,
        *,
        add_special: bool | None = None,
        parse_special: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """The token ids of a text; bytes must be UTF-8."""
        request = _tokenize_request(text, add_special, parse_special)
        return tuple((await self._call(self._generation.Tokenize, request, timeout)).ids)

    async def tokenize_with_pieces(
        self,
        text: str | bytes,
        *,
        add_special: bool | None = None,
        parse_special: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[Token, ...]:
        """The tokens of a text, each with its bytes."""
        request = _tokenize_request(text, add_special, parse_special)
        request.pieces = True
        response = await self._call(self._generation.Tokenize, request, timeout)
        return tuple(map(Token, response.ids, response.pieces))

    async def detokenize(self, ids: Sequence[int], *, special: bool | None = None, timeout: float | None = None) -> str:
        """The text of tokens; what is no complete UTF-8 becomes U+FFFD. `special` shows control tokens, too."""
        return (await self._detokenize(ids, special, timeout)).text

    async def detokenize_bytes(
        self, ids: Sequence[int], *, special: bool | None = None, timeout: float | None = None
    ) -> bytes:
        """The bytes of tokens, which need not be complete UTF-8. `special` shows control tokens, too."""
        return (await self._detokenize(ids, special, timeout)).text_bytes

    async def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool | None = None,
        parse_special: bool | None = None,
        template_arguments: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> RenderedChat:
        """What a conversation looks like to the model. The options are those of `generate`."""
        options: GenerateOptions = {
            "add_generation_prompt": add_generation_prompt,
            "parse_special": parse_special,
            "template_arguments": template_arguments,
        }
        request = generation_pb2.RenderChatRequest(chat=encode.chat_prompt(messages, options))
        response = await self._call(self._generation.RenderChat, request, timeout)
        return RenderedChat(response.text, tuple(response.ids))

    async def list_slots(self, *, timeout: float | None = None) -> tuple[Slot, ...]:
        """All slots, in the order of their ids."""
        response = await self._call(self._slots.ListSlots, slot_pb2.ListSlotsRequest(), timeout)
        return tuple(map(decode.slot, response.slots))

    async def get_slot(self, slot_id: int, *, timeout: float | None = None) -> Slot:
        """One slot. Raises NotFound."""
        response = await self._call(self._slots.GetSlot, slot_pb2.GetSlotRequest(id=slot_id), timeout)
        return decode.slot(response.slot)

    async def erase_slot(self, slot_id: int, *, timeout: float | None = None) -> int:
        """Drops what an idle slot remembers; returns how many tokens. Raises NotFound, FailedPrecondition if busy."""
        request = slot_pb2.EraseSlotRequest(id=slot_id)
        return (await self._call(self._slots.EraseSlot, request, timeout)).erased_tokens

    async def save_slot(
        self,
        slot_id: int,
        sink: state.Sink,
        *,
        draft: bool | None = None,
        chunk_bytes: int | None = None,
        on_progress: state.OnProgress | None = None,
        timeout: float | None = None,
    ) -> state.SavedSlot:
        """Writes the state of a slot, busy or not, into `sink`: a slot image, which llama-server can read, too.

        `draft` False leaves the draft model's state out. Raises NotFound, and DataLoss where what came is not what was
        sent; then `sink` has a part of it.
        """
        request = slot_pb2.SaveSlotRequest(slot_id=slot_id, draft=draft, chunk_bytes=chunk_bytes, digest="sha256")
        call = self._slots.SaveSlot(request, timeout=timeout, metadata=self._metadata)
        try:
            return await state.receive(call, sink, on_progress)
        finally:
            call.cancel()

    async def restore_slot(
        self,
        source: state.Source,
        *,
        slot_id: int | None = None,
        session: str | None = None,
        cache_key: str | None = None,
        recompute: bool = False,
        upload_id: str | None = None,
        chunk_bytes: int = state.CHUNK_BYTES,
        on_progress: state.OnProgress | None = None,
        timeout: float | None = None,
    ) -> state.RestoredSlot:
        """Puts a slot image into an idle slot, `slot_id` or one that the server chooses.

        With `recompute` tokens whose state does not fit are computed. With an `upload_id` of your own choice an upload
        that broke off goes on where it ended when this is called again.

        Raises InvalidArgument (no image), FailedPrecondition (slot busy, another model or context), DataLoss.
        """
        header = slot_pb2.RestoreSlotHeader(
            slot_id=slot_id, session=session, cache_key=cache_key, recompute=recompute, upload_id=upload_id
        )
        offset = 0
        if upload_id is not None:
            with contextlib.suppress(NotFound):
                offset = (await self.restore_status(upload_id, timeout=timeout)).committed_bytes
        with state.Outgoing(source, chunk_bytes, on_progress) as outgoing:
            call = self._slots.RestoreSlot(outgoing.requests(header, offset), timeout=timeout, metadata=self._metadata)
            try:
                with rpc_errors(call):
                    return state.restored(await call)
            finally:
                call.cancel()

    async def restore_status(self, upload_id: str, *, timeout: float | None = None) -> state.RestoreStatus:
        """How far an upload came that is not done. Raises NotFound."""
        request = slot_pb2.GetRestoreStatusRequest(upload_id=upload_id)
        response = await self._call(self._slots.GetRestoreStatus, request, timeout)
        return state.RestoreStatus(response.size_bytes, response.committed_bytes, response.expires_in.ToTimedelta())

    def resume(
        self, slot_id: int, *, progress: bool = False, timings: bool = False, timeout: float | None = None
    ) -> Generation:
        """Goes on with the generation that was restored with a slot, to the text that it would have had."""
        request = generation_pb2.GenerateRequest(slot_id=slot_id, resume=True, progress=progress, timings=timings)
        return Generation(self._generation.Generate(request, timeout=timeout, metadata=self._metadata))

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """The server's versions and state; it answers while the model is loading, too."""
        return decode.server_info(
            await self._call(self._system.GetServerInfo, system_pb2.GetServerInfoRequest(), timeout)
        )

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """The loaded model. Raises Unavailable while it is loading."""
        return decode.model_info(await self._call(self._system.GetModelInfo, system_pb2.GetModelInfoRequest(), timeout))

    async def load(self, *, timeout: float | None = None) -> Load:
        """What the server is doing."""
        return decode.load(await self._call(self._system.GetLoad, system_pb2.GetLoadRequest(), timeout))

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Returns when the server can generate; it need not run yet.

        Raises:
            DeadlineExceeded: it was not ready within `timeout` seconds.
            Unavailable: it failed to load its model, or went away.
        """
        watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_HEALTH_WATCH)
        call = watch(b"", timeout=timeout, metadata=self._metadata, wait_for_ready=True)
        try:
            with rpc_errors(call):
                async for status in call:
                    if status == _SERVING:
                        return
                    if (await self.server_info()).state is ServerState.FAILED:
                        raise Unavailable("the server failed to load its model", reason="LOAD_FAILED")
        finally:
            call.cancel()
        raise Unavailable("the server stopped telling its health", reason="WATCH_ENDED")

    def _generate(
        self,
        prompt: Prompt,
        options: GenerateOptions,
        on_result: Callable[[GenerationResult], None] | None = None,
    ) -> Generation:
        request = encode.generate_request(prompt, options)
        call = self._generation.Generate(request, timeout=options.get("timeout"), metadata=self._metadata)
        return Generation(call, on_result)

    async def _detokenize(
        self, ids: Sequence[int], special: bool | None, timeout: float | None
    ) -> generation_pb2.DetokenizeResponse:
        request = generation_pb2.DetokenizeRequest(ids=ids, special=special)
        return await self._call(self._generation.Detokenize, request, timeout)

    async def _call(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response], request: _Request, timeout: float | None
    ) -> _Response:
        call = method(request, timeout=timeout, metadata=self._metadata)
        with rpc_errors(call):
            return await call


def _tokenize_request(
    text: str | bytes, add_special: bool | None, parse_special: bool | None
) -> generation_pb2.TokenizeRequest:
    request = generation_pb2.TokenizeRequest(add_special=add_special, parse_special=parse_special)
    if isinstance(text, bytes):
        request.text_bytes = text
    else:
        request.text = text
    return request
