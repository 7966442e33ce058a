"""What can go wrong, ordered by who is at fault. Nothing here knows about gRPC; `rpc/status.py` maps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request: its path as in the contract, and what is wrong with it, limit included."""

    field: str
    description: str


class SlotwireError(Exception):
    """Base of all expected errors. `reason` is a stable UPPER_SNAKE_CASE code for programs."""

    reason = "UNKNOWN"

    def __init__(self, message: str, *, reason: str | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidRequest(SlotwireError):
    """The caller sent something that can never work."""

    reason = "INVALID_FIELD"

    def __init__(self, *violations: FieldViolation, reason: str | None = None, **metadata: object) -> None:
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        super().__init__(text, reason=reason, **metadata)
        self.violations = violations


class NotFound(SlotwireError):
    """What the caller named does not exist."""

    reason = "NOT_FOUND"


class Conflict(SlotwireError):
    """The request is fine, but the state of what it names does not allow it now (a busy slot)."""

    reason = "CONFLICT"


class OutOfRange(SlotwireError):
    """The caller is at another place of something that goes on from piece to piece; the message says which is right."""

    reason = "OUT_OF_RANGE"


class DataLoss(SlotwireError):
    """Bytes are not what they were: damaged on their way, or where they were kept."""

    reason = "DATA_LOSS"


class Exhausted(SlotwireError):
    """There is no room (queue, cache, outbox). `retry_after` is in seconds; None where a retry does not help."""

    reason = "EXHAUSTED"

    def __init__(
        self, message: str, *, retry_after: float | None = None, reason: str | None = None, **metadata: object
    ) -> None:
        super().__init__(message, reason=reason, **metadata)
        self.retry_after = retry_after


class Unavailable(SlotwireError):
    """The backend is loading, draining or gone. `retry_after` is in seconds; None where a retry does not help."""

    reason = "UNAVAILABLE"

    def __init__(
        self, message: str, *, retry_after: float | None = None, reason: str | None = None, **metadata: object
    ) -> None:
        super().__init__(message, reason=reason, **metadata)
        self.retry_after = retry_after


class DeadlineExceeded(SlotwireError):
    """The caller's own deadline passed."""

    reason = "DEADLINE_EXCEEDED"


class ConfigError(SlotwireError):
    """The operator's settings or model file cannot be used."""

    reason = "CONFIG"


class EngineFailure(SlotwireError):
    """The library failed while working on this request; the engine goes on with the others."""

    reason = "ENGINE_FAILURE"
