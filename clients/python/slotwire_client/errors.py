"""What a call can raise: one class for each gRPC status, with the details that the server sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_REQUEST_ID_KEY = "x-request-id"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request: its path as in the contract, and what is wrong with it."""

    field: str
    description: str


class SlotwireError(Exception):
    """Base of all errors that a call raises.

    Attributes:
        code: The gRPC status.
        message: What went wrong, for people.
        reason: A stable UPPER_SNAKE_CASE code for programs; None where no Slotwire server answered.
        metadata: Further facts that go with the reason.
        violations: The bad fields of the request.
        retry_after: Seconds after which another try makes sense; None where the server did not say.
        request_id: The server's name for the request, to find it in the logs; None where it did not say.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
        violations: tuple[FieldViolation, ...] = (),
        retry_after: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata = metadata
        self.violations = violations
        self.retry_after = retry_after
        self.request_id = request_id


class Cancelled(SlotwireError):
    """The call was cancelled, by `Generation.cancel` or by the server."""

    code = grpc.StatusCode.CANCELLED


class UnknownError(SlotwireError):
    """The server failed without saying how."""

    code = grpc.StatusCode.UNKNOWN


class InvalidArgument(SlotwireError):
    """The request can never work; `violations` names the fields."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class DeadlineExceeded(SlotwireError):
    """The call's `timeout` passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class NotFound(SlotwireError):
    """What the request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(SlotwireError):
    """What the request would make exists."""

    code = grpc.StatusCode.ALREADY_EXISTS


class PermissionDenied(SlotwireError):
    """The credentials do not allow this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class ResourceExhausted(SlotwireError):
    """There is no room now; see `retry_after`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(SlotwireError):
    """The state of what the request names does not allow it now (a busy slot)."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(SlotwireError):
    """The server gave up on the request because of another one."""

    code = grpc.StatusCode.ABORTED


class OutOfRange(SlotwireError):
    """A position is outside what exists."""

    code = grpc.StatusCode.OUT_OF_RANGE


class Unimplemented(SlotwireError):
    """The server does not know this call."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(SlotwireError):
    """The server has a fault; its log has the `request_id`."""

    code = grpc.StatusCode.INTERNAL


class Unavailable(SlotwireError):
    """The server is loading, draining, gone or was never there."""

    code = grpc.StatusCode.UNAVAILABLE


class DataLoss(SlotwireError):
    """Data arrived damaged or not whole."""

    code = grpc.StatusCode.DATA_LOSS


class Unauthenticated(SlotwireError):
    """Credentials are missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED


_BY_CODE = {kind.code: kind for kind in SlotwireError.__subclasses__()}


def from_rpc_error(error: grpc.aio.AioRpcError) -> SlotwireError:
    """The client's error for gRPC's. Never raises: details that cannot be read are left out."""
    trailing = error.trailing_metadata() or grpc.aio.Metadata()
    info, bad_request, retry = _details(trailing.get(_DETAILS_KEY))
    request_id = trailing.get(_REQUEST_ID_KEY)
    return _BY_CODE.get(error.code(), UnknownError)(
        error.details() or error.code().name,
        reason=info.reason or None,
        metadata=MappingProxyType(dict(info.metadata)),
        violations=tuple(FieldViolation(item.field, item.description) for item in bad_request.field_violations),
        retry_after=retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None,
        request_id=request_id if isinstance(request_id, str) else None,
    )


@contextmanager
def rpc_errors(call: grpc.aio.Call) -> Iterator[None]:
    """Turns what reading from `call` raises into a SlotwireError. A cancelled reader cancels the call."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        # gRPC raises this for a call that was cancelled, too, where nobody cancelled the reader's task.
        call.cancel()
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled("the call was cancelled") from None


def _details(
    packed: str | bytes | None,
) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo]:
    """The details of a google.rpc.Status; empty messages where there are none."""
    info, bad_request, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    try:
        status = status_pb2.Status.FromString(packed) if isinstance(packed, bytes) else status_pb2.Status()
        for detail in status.details:
            for message in (info, bad_request, retry):
                detail.Unpack(message)
    except DecodeError:
        return error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    return info, bad_request, retry
