"""What can be wrong with bytes that claim to be a slot image."""

from __future__ import annotations

from service.errors import SlotwireError


class ImageError(SlotwireError):
    """The bytes are no slot image, or a damaged one. `offset` is where, in bytes from the start of the image."""

    reason = "BAD_IMAGE"

    def __init__(self, message: str, *, offset: int, reason: str | None = None) -> None:
        super().__init__(f"{message} (byte {offset})", reason=reason, offset=offset)
        self.problem = message
        self.offset = offset


class PayloadError(ImageError):
    """What llama.cpp is to read is not what it writes. `offset` is in bytes from the start of the payload,
    and from that of the image where an image is read.
    """

    reason = "BAD_PAYLOAD"


class ManifestError(SlotwireError):
    """Our own section is not what we write."""

    reason = "BAD_MANIFEST"
