"""How clients reach a server: addresses, TLS, who they are; and how long they go on trying."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
RESUME_SECONDS = 60.0
MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_MILLISECONDS = 15_000
"""Longer than what a router takes for a flood of pings."""
PING_TIMEOUT_MILLISECONDS = 10_000

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A router that was restarted is found again soon, and one that answers nothing at all is given up.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    # The first closes a connection whose other machine is gone (it becomes TCP_USER_TIMEOUT), the second also one
    # whose other process stands still.
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MILLISECONDS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MILLISECONDS),
    ("grpc.http2.max_pings_without_data", 0),
)

Metadata = tuple[tuple[str, str], ...]
"""Sent with every call."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """PEM files: whom to trust, and for mutual TLS who this is. Raises ValueError for a certificate without its key."""

    ca: str | PathLike[str] | None = None
    """Certificate authorities; None: gRPC's own list of public ones."""
    certificate: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key are given together or not at all")

    def credentials(self) -> grpc.ChannelCredentials:
        """The files as they are now. Raises OSError."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))


class ClientOptions(TypedDict, total=False):
    """How a client connects. Without `tls` and `credentials` it speaks plain text."""

    timeout: float | None
    """Default of every call, in seconds; None waits for ever."""
    retry_timeout: float
    """Seconds to go on asking where no router has ever answered, none takes a request, or all are overloaded, at the
    intervals that the server says. 0, the default: every address is asked once, and an overloaded server not again."""
    resume_timeout: float
    """Seconds without a new token after which a stream that broke is given up, and so long any call waits for routers
    that have answered before and do not now. 60 by default; 0 waits for nothing and resumes nothing."""
    tls: TlsOptions | None
    token: str | None
    """Bearer token."""
    tenant: str | None
    """Whom the requests are charged to, where the token does not say."""
    credentials: grpc.ChannelCredentials | None
    """Instead of `tls`."""
    metadata: Metadata


def open_channel(api: Any, address: str, credentials: grpc.ChannelCredentials | None) -> Any:
    """A channel of `api`, which is grpc or grpc.aio; without credentials in plain text."""
    if credentials is None:
        return api.insecure_channel(address, CHANNEL_OPTIONS)
    return api.secure_channel(address, credentials, CHANNEL_OPTIONS)


def choose_credentials(
    tls: TlsOptions | None, credentials: grpc.ChannelCredentials | None
) -> grpc.ChannelCredentials | None:
    """Raises ValueError where both are given, OSError for a file that cannot be read."""
    if tls is not None and credentials is not None:
        raise ValueError("tls and credentials are two ways to say the same: give one")
    return credentials if tls is None else tls.credentials()


def call_metadata(token: str | None, tenant: str | None, metadata: Metadata) -> Metadata:
    """What goes with every call. Raises ValueError, which does not repeat the token."""
    found = list(metadata)
    if token is not None:
        _check("token", token)
        found.append(("authorization", f"Bearer {token}"))
    if tenant is not None:
        _check("tenant", tenant)
        found.append(("x-sluice-tenant", tenant))
    return tuple(found)


def _check(name: str, value: str) -> None:
    if not value or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(f"{name} must be visible ASCII characters without spaces")


def _read(path: str | PathLike[str] | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
