"""Every error of the taxonomy has a status, and programs find in its details what people read in its message."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

import service.state.errors as state_errors
from service.errors import DataLoss, OutOfRange, SlotwireError
from service.rpc.status import code_of, details_of
from service.state.errors import ImageError, ManifestError, PayloadError

STATUSES = {
    OutOfRange("at 7", committed=7): grpc.StatusCode.OUT_OF_RANGE,
    DataLoss("another digest", reason="DIGEST_MISMATCH"): grpc.StatusCode.DATA_LOSS,
    ImageError("it is no slot image", offset=0): grpc.StatusCode.INVALID_ARGUMENT,
    PayloadError("rows of 3 bytes", offset=99): grpc.StatusCode.INVALID_ARGUMENT,
    ManifestError("it is no JSON object"): grpc.StatusCode.INVALID_ARGUMENT,
}


def kinds(base: type[SlotwireError]) -> set[type[SlotwireError]]:
    return {base}.union(*(kinds(kind) for kind in base.__subclasses__()))


@pytest.mark.parametrize("error", STATUSES, ids=lambda error: type(error).__name__)
def test_errors_of_states_have_their_status_and_details(error: SlotwireError) -> None:
    status = status_pb2.Status.FromString(details_of(error))
    assert code_of(error) is STATUSES[error]
    assert status.code == STATUSES[error].value[0]
    assert status.message == error.message
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (error.reason, "slotwire", error.metadata)


def test_no_kind_of_error_is_without_a_status() -> None:
    assert state_errors.ImageError in kinds(SlotwireError)
    ours = {kind for kind in kinds(SlotwireError) if kind.__module__.startswith("service.")} - {SlotwireError}
    assert len(ours) > 10
    for kind in ours:
        assert code_of(kind.__new__(kind)) is not grpc.StatusCode.UNKNOWN, kind
