"""A gRPC server on one interface and port."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
from grpc import aio
from structlog.stdlib import BoundLogger

from router.access.tls import Certificates
from sluice.host.descriptors import OWN_DESCRIPTORS, WATCHED_LANE_DESCRIPTORS, check_limit
from sluice.settings.services import RouterSettings
from sluice.telemetry.server import MAX_CONNECTIONS

KEEPALIVE_MILLISECONDS = 20_000
HANDSHAKE_MILLISECONDS = 10_000
MIN_PING_MILLISECONDS = 5_000
"""Minimum interval between two pings of a client. Documented as 10 s, because timers and networks are not exact."""
MAX_PING_STRIKES = 2
MAX_METADATA_BYTES = 16 << 10
"""Metadata of one call: a token, a tenant and what proxies add."""
MAX_STREAMS = 24_576
"""Concurrent calls on one connection. Each call also counts towards max_open.

A client should wait at this limit, but gRPC's server resets many calls of a client that stays at it, because it counts
ended calls for a while longer. So the limit is beyond what one client sends at once. Such a call takes about 8 KiB."""
MIN_PENDING = 24_576
"""Minimum for the limit of calls that gRPC queues before they are handled."""
MAX_PENDING_SECONDS = 600
REFUSED_SECONDS = 365 * 86_400.0
"""Time for open calls after `refuse`, in effect unlimited, unless `stop` cuts them earlier."""


class Listener:
    """Listens from `bind` on, serves from `start` to `stop`, and accepts no new calls from `refuse` on."""

    def __init__(
        self,
        host: str,
        port: int,
        settings: RouterSettings,
        certificates: Certificates | None,
        handlers: Sequence[grpc.GenericRpcHandler],
    ) -> None:
        self.host = f"[{host}]" if ":" in host else host
        self.port = port
        """0 stands for any free port; `bind` replaces it by the actual port."""
        self._certificates = certificates
        self._refusing: asyncio.Task[None] | None = None
        self._server = aio.server(options=_options(settings))
        self._server.add_generic_rpc_handlers(tuple(handlers))

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def bind(self) -> None:
        """Raises RuntimeError if the port is taken or the certificates are unusable."""
        if self._certificates is None:
            port = self._server.add_insecure_port(self.address)
        else:
            port = self._server.add_secure_port(self.address, self._certificates.credentials())
        if port == 0:
            raise RuntimeError(f"cannot listen on {self.address}")
        self.port = port

    async def start(self) -> None:
        await self._server.start()

    async def ended(self) -> None:
        """Returns or raises if the server ends without having been stopped."""
        await self._server.wait_for_termination()
        if self._refusing is not None:
            await asyncio.Event().wait()

    def refuse(self) -> asyncio.Task[None]:
        """Accept no new calls or connections; clients get GOAWAY and connect elsewhere. Irreversible.

        Returns a task that finishes when the last open call has ended.
        """
        if self._refusing is None:
            self._refusing = asyncio.create_task(self._server.stop(REFUSED_SECONDS))
        return self._refusing

    async def stop(self, seconds: float) -> None:
        """Accept no more calls, and cut the open ones after `seconds`."""
        refusing = self.refuse()
        # Do not call the server's `stop` with a grace again: it may cancel calls of a server that the first call has
        # just destroyed.
        _, pending = await asyncio.wait({refusing}, timeout=seconds)
        if pending:
            await self._server.stop(None)
        await refusing


def fit_connections(settings: RouterSettings, limit: int, log: BoundLogger) -> RouterSettings:
    """`settings` with `max_connections` reduced, so that enough of the `limit` file descriptors remain for the ring."""
    # ZeroMQ aborts the process if no descriptor is left for a connection to an ipc inbox (ipc_listener.cpp).
    peers = len(settings.engines) + len(settings.detokenizers)
    reserved = OWN_DESCRIPTORS + MAX_CONNECTIONS + peers * WATCHED_LANE_DESCRIPTORS
    check_limit(limit, settings.max_connections + reserved, log)
    return replace(settings, max_connections=max(1, min(settings.max_connections, limit - reserved)))


def _options(settings: RouterSettings) -> list[tuple[str, int]]:
    # gRPC cancels a call that it cannot queue without giving a reason, so our own limits must be reached first.
    pending = max(settings.max_open, MIN_PENDING)
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        # Set both to the same value, because between the soft and the hard limit gRPC refuses calls at random.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MILLISECONDS),
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", pending),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_SECONDS),
        # Keep-alive pings end the requests of a client whose machine has died.
        ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MILLISECONDS // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MILLISECONDS),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
        *_age_options(settings),
    ]


def _age_options(settings: RouterSettings) -> list[tuple[str, int]]:
    # gRPC's defaults are infinite. Its minimum age is 1 ms.
    age, grace = settings.max_connection_age, settings.max_connection_age_grace
    options = [("grpc.max_connection_age_ms", max(1, round(age * 1000)))] if age else []
    return options if grace is None else [*options, ("grpc.max_connection_age_grace_ms", round(grace * 1000))]
