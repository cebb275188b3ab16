"""The connection of a client: its options, and its interchangeable routers, of which one is in use at a time."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict
from weakref import WeakSet

import grpc
from grpc_health.v1 import health_pb2_grpc

from sluice.client.errors import Cancelled, SluiceError, Unreachable, WrongServer, explain, from_rpc_error
from sluice.client.retries import Retries, is_router_failure
from sluice.settings.names import checks_options
from sluice.v1 import admin_pb2_grpc, generation_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
RESUME_SECONDS = 60.0
"""Default of `ClientOptions.resume_timeout`."""
MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_MILLISECONDS = 10_000
"""Interval of keepalive pings; routers close connections with much more frequent pings."""
PING_TIMEOUT_MILLISECONDS = 5_000
"""How long a stream stalls when its router's machine fails, provided that unacknowledged data is in flight."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Reconnect soon after a router restarts, but allow 5 s for each connection attempt.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    # The first one (TCP_USER_TIMEOUT) closes connections to a machine that has failed, the second one also those to a
    # process that hangs.
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MILLISECONDS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MILLISECONDS),
    ("grpc.http2.max_pings_without_data", 0),
)

Metadata = tuple[tuple[str, str], ...]
"""gRPC metadata: pairs of a lower-case name and a value."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """PEM files for TLS. Raises ValueError if `certificate` is given without `key` or vice versa."""

    ca: str | PathLike[str] | None = None
    """Trusted certificate authorities; None: gRPC's list of public authorities."""
    certificate: str | PathLike[str] | None = None
    """The client's certificate, for mutual TLS."""
    key: str | PathLike[str] | None = None
    """The private key of the client's certificate."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("TlsOptions: certificate and key must be given together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises OSError."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))


class ClientOptions(TypedDict, total=False):
    """Options of both clients. Connections are encrypted only with `tls` or `credentials`."""

    timeout: float | None
    """Default timeout of calls, in seconds; None: no timeout."""
    retry_timeout: float
    """How long to retry a request that no router has accepted, in seconds, at the intervals that the server suggests.
    Default 0: each address is tried once."""
    resume_timeout: float
    """How long to try to resume a broken stream, in seconds since its latest token, and to wait for routers that have
    answered before or accepted a connection. Default 60; 0: do neither."""
    tls: TlsOptions | None
    token: str | None
    """Bearer token."""
    tenant: str | None
    """Tenant of the requests, if the token does not name one."""
    credentials: grpc.ChannelCredentials | None
    """gRPC's channel credentials, in place of `tls`."""
    on_waiting: Callable[[float], None] | None
    """Called when a call has waited 2 s for a router that is gone or draining, with the seconds that it may wait in
    all. Called in the thread, or the event loop, of the call."""
    metadata: Metadata
    """Metadata to send with every call."""


class Router:
    """The channel to one address, with a stub for each service. `api` is grpc or grpc.aio."""

    def __init__(self, api: Any, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        self._uses_tls = credentials is not None
        self.channel = (
            api.insecure_channel(address, CHANNEL_OPTIONS)
            if credentials is None
            else api.secure_channel(address, credentials, CHANNEL_OPTIONS)
        )
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.models: Any = admin_pb2_grpc.ModelServiceStub(self.channel)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    def error(self, failure: Any) -> SluiceError:
        """The exception for the failure of a call, see `from_rpc_error`."""
        error = from_rpc_error(failure)
        if not isinstance(error, Unreachable):
            return error
        explanation = explain(error, self.address, self._uses_tls)
        return error if explanation is None else WrongServer(explanation)


Method = Callable[[Router], Any]
"""Selects the method to call, such as `lambda router: router.generation.Generate`."""


def _check_address(address: str) -> None:
    """Raises ValueError for a URL, and for a host without a port, for which gRPC would assume port 443."""
    if "://" in address and address.startswith("http"):
        raise ValueError(f"address {address!r} is a URL, must be HOST:PORT of a router, such as {DEFAULT_ADDRESS}")
    if ":" not in address:
        raise ValueError(f"address {address!r} has no port, must be HOST:PORT of a router, such as {DEFAULT_ADDRESS}")


@checks_options()
class Routers:
    """The routers of a client. Calls go to `current`, until it fails.

    Raises ValueError for an invalid address or option, OSError for an unreadable PEM file.
    """

    def __init__(
        self,
        api: Any,
        addresses: str | Sequence[str],
        *,
        timeout: float | None = None,
        retry_timeout: float = 0.0,
        resume_timeout: float = RESUME_SECONDS,
        tls: TlsOptions | None = None,
        token: str | None = None,
        tenant: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        on_waiting: Callable[[float], None] | None = None,
        metadata: Metadata = (),
    ) -> None:
        self.addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self.addresses:
            raise ValueError("addresses is empty, must name at least one router")
        for address in self.addresses:
            _check_address(address)
        if tls is not None and credentials is not None:
            raise ValueError("tls and credentials are mutually exclusive: give one of them")
        self.metadata = _call_metadata(token, tenant, metadata)
        self.closed = False
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._open: WeakSet[Any] = WeakSet()
        self._timeout = timeout
        self._retry_timeout = retry_timeout
        self._resume_timeout = resume_timeout
        self._on_waiting = on_waiting
        credentials = credentials if tls is None else tls.credentials()
        self.all = [Router(api, address, credentials) for address in self.addresses]
        # Random, so that clients with the same list of addresses spread across the routers.
        self._current = random.randrange(len(self.all))

    @property
    def current(self) -> Router:
        return self.all[self._current]

    def start(
        self, router: Router, method: Method, request: Any, timeout: float | None, metadata: Metadata = ()
    ) -> Any:
        """Start a streaming call, or any call of grpc.aio."""
        # A weak reference, since `close` need not cancel a call that ended, or whose stream was deleted.
        call = method(router)(request, timeout=timeout, metadata=self.metadata_with(metadata))
        with self._lock:
            self._open.add(call)
        return call

    def metadata_with(self, metadata: Metadata) -> Metadata:
        """The metadata of one call: `metadata` replaces the client's entries of the same name."""
        if not metadata:
            return self.metadata
        names = {name.lower() for name, _ in metadata}
        return tuple(entry for entry in self.metadata if entry[0].lower() not in names) + tuple(metadata)

    def close(self) -> None:
        """Cancel the open calls of `start`, which not every version of grpc.aio does when a channel closes."""
        self.closed = True
        with self._lock:
            calls = list(self._open)
        for call in calls:
            call.cancel()

    def skip(self, router: Router) -> None:
        """Switch to the next router after `router` has failed."""
        # Only if no other call has switched yet: calls that fail together must not skip healthy routers.
        if self.current is router:
            self._current = (self._current + 1) % len(self.all)

    def on_failure(self, router: Router, error: SluiceError, retries: Retries) -> float:
        """Return the seconds to wait before the next attempt, at `current`. Raises `error` if it is final."""
        if is_router_failure(error):
            self.skip(router)
        self.check_open()
        now = time.monotonic()
        pause = retries.on_failure(error, now)
        if self._on_waiting is not None and (seconds := retries.long_wait(error, now + pause)) is not None:
            self._on_waiting(seconds)
        return pause

    def on_only_failure(self, router: Router, error: SluiceError) -> None:
        """Note the failure of a call that is not retried: the next call goes to another router, if that may help."""
        if is_router_failure(error):
            self.skip(router)

    def check_open(self) -> None:
        """Raises Cancelled if the client is closed."""
        if self.closed:
            raise Cancelled("the client is closed")

    def begin(self, timeout: float | None) -> Retries:
        """Begin a new request. `timeout` is in seconds; None: the default. Raises Cancelled if the client is closed."""
        self.check_open()
        limit = self._timeout if timeout is None else timeout
        now = time.monotonic()
        return Retries(len(self.all), limit, self._retry_timeout, self._resume_timeout, now, self._answered)


def any_true(is_true: Callable[[Any], bool], answers: Sequence[Any]) -> bool:
    """Whether `is_true` holds for any router's answer. Raises the first error if no router answered."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if len(errors) == len(answers):
        raise errors[0]
    return any(is_true(answer) for answer in answers if not isinstance(answer, BaseException))


def _call_metadata(token: str | None, tenant: str | None, metadata: Metadata) -> Metadata:
    """Raises ValueError, whose message does not contain the token."""
    entries = list(metadata)
    if token is not None:
        _check("token", token)
        entries.append(("authorization", f"Bearer {token}"))
    if tenant is not None:
        _check("tenant", tenant)
        entries.append(("x-sluice-tenant", tenant))
    return tuple(entries)


def _check(name: str, value: str) -> None:
    if not value or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(f"{name} must be one or more printable ASCII characters other than spaces")


def _read(path: str | PathLike[str] | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
