"""What every RPC has in common: a request id, errors as statuses, and an answer to bytes that are no message."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from service.errors import Exhausted, FieldViolation, InvalidRequest, SlotwireError
from service.rpc.status import DETAILS_KEY, code_of, details_of, known

REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stubs alone
_Behaviour = Callable[[Any, _Context], Awaitable[Any]]


class Refused:
    """Stands for a request that was not parsed, until there is a context to refuse it through."""

    def __init__(self, error: SlotwireError) -> None:
        self.error = error


class Boundary(grpc.aio.ServerInterceptor):
    """Wraps the handlers of Slotwire's own services. Their behaviours are coroutines: streams are written, not
    yielded, so that wrapping costs nothing per message. `max_bytes` is the limit of one request.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/slotwire."):
            return cast("_Handler | None", handler)
        parse = _lenient(handler.request_deserializer, self._max_bytes)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(
                _guarded(handler.stream_unary), parse, handler.response_serializer
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _guarded(handler.unary_stream), parse, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(_guarded(handler.unary_unary), parse, handler.response_serializer)


def request_id(context: _Context) -> str:
    """The caller's own id, where it sent a usable one under `x-request-id`, or a new one."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return f"{value}-{uuid.uuid4().hex[:8]}"  # callers may repeat themselves, the engine needs it unique
    return uuid.uuid4().hex


def _lenient(parse: Callable[[bytes], Any], max_bytes: int) -> Callable[[bytes], Any]:
    """`parse`, with a stand-in where it would raise: gRPC would only say that deserializing failed."""

    def deserialize(data: bytes) -> Any:
        if len(data) > max_bytes:
            message = f"the request has {len(data)} bytes; the limit is {max_bytes}"
            return Refused(Exhausted(message, reason="MESSAGE_TOO_LARGE", limit=max_bytes))
        try:
            return parse(data)
        except DecodeError as error:
            violation = FieldViolation("message", f"{len(data)} bytes are no valid message: {error}")
            return Refused(InvalidRequest(violation, reason="MALFORMED_MESSAGE"))

    return deserialize


def _guarded(behaviour: _Behaviour) -> _Behaviour:
    async def call(request: Any, context: _Context) -> Any:
        try:
            if isinstance(request, Refused):
                raise request.error
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, known(error))

    return call


async def _abort(context: _Context, error: SlotwireError) -> NoReturn:
    trailing = (*(context.trailing_metadata() or ()), (DETAILS_KEY, details_of(error)))
    await context.abort(code_of(error), error.message[:_MESSAGE_LIMIT], trailing)


_MESSAGE_LIMIT = 2048  # of the status message: it travels in a header; the details have it whole
