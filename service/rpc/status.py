"""Errors as gRPC statuses with google.rpc details. The only place that knows both."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator

import grpc
from google.protobuf import any_pb2, message
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from service.errors import (
    ConfigError,
    Conflict,
    DataLoss,
    DeadlineExceeded,
    EngineFailure,
    Exhausted,
    InvalidRequest,
    NotFound,
    OutOfRange,
    SlotwireError,
    Unavailable,
)
from service.state.errors import ImageError, ManifestError

log = logging.getLogger("slotwire.rpc")

DOMAIN = "slotwire"
DETAILS_KEY = "grpc-status-details-bin"

_CODES: tuple[tuple[type[SlotwireError], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    (OutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (DataLoss, grpc.StatusCode.DATA_LOSS),
    (Exhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (EngineFailure, grpc.StatusCode.INTERNAL),
    # What the caller sent came as it was sent, and can never work. Who reads a state of his own compares its digest
    # first, which is DataLoss where it differs.
    (ImageError, grpc.StatusCode.INVALID_ARGUMENT),
    (ManifestError, grpc.StatusCode.INVALID_ARGUMENT),
)


def known(error: Exception) -> SlotwireError:
    """`error` itself where it belongs to the taxonomy. Anything else is logged whole, and only its incident id is
    told to the caller.
    """
    if isinstance(error, SlotwireError):
        return error
    incident = uuid.uuid4().hex[:12]
    log.error("request failed: incident %s", incident, exc_info=error)
    return EngineFailure(f"unexpected failure; incident {incident}", reason="UNEXPECTED", incident=incident)


def code_of(error: SlotwireError) -> grpc.StatusCode:
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.UNKNOWN)


def details_of(error: SlotwireError) -> bytes:
    """The serialized google.rpc.Status that goes into the trailing metadata under DETAILS_KEY."""
    status = status_pb2.Status(code=code_of(error).value[0], message=error.message)
    for detail in _details(error):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    data: bytes = status.SerializeToString()
    return data


def _details(error: SlotwireError) -> Iterator[message.Message]:
    yield error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    if isinstance(error, InvalidRequest):
        yield error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
                for v in error.violations
            ]
        )
    if isinstance(error, (Exhausted, Unavailable)) and error.retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        yield error_details_pb2.RetryInfo(retry_delay=delay)
    if isinstance(error, Conflict):
        yield error_details_pb2.PreconditionFailure(
            violations=[
                error_details_pb2.PreconditionFailure.Violation(type=error.reason, description=error.message)
            ]
        )  # fmt: skip
