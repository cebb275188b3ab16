"""How clients connect: channels, TLS, credentials, timeouts."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
RESUME_SECONDS = 60.0
MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_MILLISECONDS = 15_000
"""Long enough that a router does not close the connection for too many pings."""
PING_TIMEOUT_MILLISECONDS = 10_000

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Reconnect soon after a router restarts, but give a connection attempt 5 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    # The first (TCP_USER_TIMEOUT) closes connections to a machine that is gone, the second also those to a process
    # that hangs.
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MILLISECONDS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MILLISECONDS),
    ("grpc.http2.max_pings_without_data", 0),
)

Metadata = tuple[tuple[str, str], ...]
"""Sent with every call."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """PEM files; certificate and key are for mutual TLS. Raises ValueError if only one of these is given."""

    ca: str | PathLike[str] | None = None
    """Trusted certificate authorities; None: gRPC's list of public ones."""
    certificate: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key must be given together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises OSError."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))


class ClientOptions(TypedDict, total=False):
    """How a client connects. Without `tls` and `credentials` connections are not encrypted."""

    timeout: float | None
    """Default timeout of every call, in seconds; None: no timeout."""
    retry_timeout: float
    """Seconds to retry a request that no router has accepted (unreachable so far, refusing, or overloaded), at the
    intervals that the server suggests. Default 0: each address is tried once."""
    resume_timeout: float
    """Seconds to keep resuming a broken stream that gets no new tokens, and to wait for routers that answered before
    and do not now. Default 60; 0: neither."""
    tls: TlsOptions | None
    token: str | None
    """Bearer token."""
    tenant: str | None
    """Tenant of the requests, where the token does not name one."""
    credentials: grpc.ChannelCredentials | None
    """Instead of `tls`."""
    metadata: Metadata


def open_channel(api: Any, address: str, credentials: grpc.ChannelCredentials | None) -> Any:
    """A channel of `api` (grpc or grpc.aio); unencrypted without credentials."""
    if credentials is None:
        return api.insecure_channel(address, CHANNEL_OPTIONS)
    return api.secure_channel(address, credentials, CHANNEL_OPTIONS)


def choose_credentials(
    tls: TlsOptions | None, credentials: grpc.ChannelCredentials | None
) -> grpc.ChannelCredentials | None:
    """Raises ValueError if both are given, OSError for an unreadable file."""
    if tls is not None and credentials is not None:
        raise ValueError("tls and credentials are mutually exclusive: give one")
    return credentials if tls is None else tls.credentials()


def call_metadata(token: str | None, tenant: str | None, metadata: Metadata) -> Metadata:
    """The metadata of every call. Raises ValueError, without quoting the token."""
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
