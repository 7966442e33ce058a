"""Where a store is: a directory, memory, or S3 and what speaks its language."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import MemoryStore, S3Store

from service.errors import ConfigError
from service.state.directory import Directory
from service.state.objects import Objects

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

_LONGEST_READ = timedelta(days=1)
"""Of one object, however slowly its reader takes it. That something comes is what `timeout` is for."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """For S3; what is empty comes from the environment (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, ...).

    `conditional_put`: whether the store knows If-None-Match. `connect_timeout` and `timeout`, for one answer or the
    next bytes of it, are in seconds; a request that fails is tried again up to `retries` times within `timeout`.
    """

    endpoint: str = ""
    region: str = ""
    access_key_id: str = field(default="", repr=False)
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    conditional_put: bool = True
    connect_timeout: float = 5.0
    timeout: float = 30.0
    retries: int = 3

    @property
    def patience(self) -> float:
        """Seconds after which an operation is given up that did not fail by itself: more than all its tries take."""
        return 2 * (self.connect_timeout + self.timeout)


def open_objects(url: str, options: StoreOptions) -> Objects:
    """The objects at a directory, given as a path or "file:///path", "memory:", or "s3://bucket/prefix".

    Nothing is asked of S3 yet. Raises ConfigError where it cannot be.
    """
    scheme = urlsplit(url).scheme if "://" in url or url.startswith("memory:") else ""
    match scheme:
        case "" if url:
            return Directory(Path(url).expanduser().absolute(), options.patience)
        case "file":
            parts = urlsplit(url)
            if parts.netloc in ("", "localhost") and parts.path not in ("", "/"):
                return Directory(Path(unquote(parts.path)), options.patience)
        case "memory":
            return Objects(MemoryStore(), options.patience)
        case "s3":
            return Objects(_s3(url, options), options.patience)
    known = 'a directory, "file:///path", "memory:" or "s3://bucket/prefix"'
    raise ConfigError(f"snapshots cannot be kept in {url!r}: it must be {known}", reason="STORE")


def _s3(url: str, options: StoreOptions) -> S3Store:
    parts = urlsplit(url)
    if not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc or ":" in parts.netloc:
        raise ConfigError("a snapshot store in S3 must be s3://bucket/prefix", reason="STORE")
    given = {
        "endpoint": options.endpoint,
        "region": options.region,
        "access_key_id": options.access_key_id,
        "secret_access_key": options.secret_access_key,
        "session_token": options.session_token,
        "conditional_put": "" if options.conditional_put else "disabled",
    }
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=options.connect_timeout),
        "read_timeout": timedelta(seconds=options.timeout),
        "timeout": _LONGEST_READ,
        "allow_http": True,  # where the endpoint says so, which may be that of the environment
    }
    retry: RetryConfig = {"max_retries": options.retries, "retry_timeout": timedelta(seconds=options.timeout)}
    config = cast("S3Config", {key: value for key, value in given.items() if value})
    try:
        return S3Store(
            parts.netloc, prefix=parts.path.strip("/") or None, config=config, client_options=client, retry_config=retry
        )
    except (BaseError, ValueError) as error:
        text = str(error).split("\n", 1)[0]
        raise ConfigError(f"a snapshot store in S3 cannot be set up: {text}", reason="STORE") from None
