"""The gateway's process: HTTP server, client of the ring, signals and health probes."""

import asyncio
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import uvicorn
from structlog.stdlib import BoundLogger

from gateway import metrics
from gateway.api.access_log import log_invalid
from gateway.api.gateway import Gateway
from gateway.app import build_app
from gateway.connection import Connection, WaitingConnections
from sluice.client import AsyncClient, ClientOptions, Forbidden, SluiceError, TlsOptions, Unauthenticated
from sluice.host.ports import LISTENER_VARIABLE, bound, inherited
from sluice.settings.gateway import GatewaySettings
from sluice.settings.read import changed_settings
from sluice.telemetry.server import MetricsPort
from sluice.telemetry.service_status import ProgressBeacon, ServiceStatus, StatusFile
from sluice.telemetry.status_report import ServiceReport

KEEP_ALIVE_SECONDS = 60
"""After this time an idle connection is closed."""
TICK_SECONDS = 0.5
SHARE_SECONDS = 0.05
"""Interval at which a gateway that shares its port checks whether it may accept connections."""
HEALTH_SECONDS = 2.0
"""Timeout for a router's health check, and for asking which model it serves."""
ASK_SECONDS = 10.0
"""Interval at which to ask the routers about the ring."""
BACKLOG = 1024


async def serve(settings: GatewaySettings, log: BoundLogger, metrics_port: MetricsPort) -> None:
    """Serve until a signal arrives; open requests then have `drain_timeout` seconds to finish.

    Raises OSError or ValueError if the server cannot start, RuntimeError if a background task has failed.
    """
    _check_certificate(settings)
    async with AsyncClient(settings.routers, **_client_options(settings)) as client:
        gateway = Gateway(client, settings, log)
        listener = _listen(settings)
        host, port = listener.getsockname()[:2]
        server = Server(gateway)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.stop)
        status = StatusFile()
        watch = asyncio.create_task(_watch(gateway, server, status, f"{host}:{port}"))
        beacon = ProgressBeacon(status_file=status)
        tick = asyncio.create_task(_tick(beacon))
        report = ServiceReport(f"{host}:{port}")
        read, unready = partial(metrics.read, gateway.counters, gateway.budget), partial(_unready, gateway, server)
        metrics_port.show(beacon, read, unready, lambda: report)
        background = (watch, tick)
        for task in background:
            # Without these tasks the gateway cannot report its health: exit, so that it is restarted.
            task.add_done_callback(lambda done: None if done.cancelled() else server.stop())
        try:
            await _ready_to_share(gateway, server)
            await server.serve(sockets=[listener])
        finally:
            failed = [task for task in background if task.done()]
            for task in background:
                task.cancel()
            metrics_port.close()
        if failed:
            raise RuntimeError(f"a background task failed: {failed[0].exception()!r}")
        log.info("stopped")


class Server(uvicorn.Server):
    def __init__(self, gateway: Gateway) -> None:
        settings = gateway.settings
        # uvicorn would log malformed requests of clients as errors; the application logs its own.
        logging.getLogger("uvicorn").addHandler(logging.NullHandler())
        logging.getLogger("uvicorn").propagate = False
        config = uvicorn.Config(
            build_app(gateway),
            loop="none",
            http=_connection_type(gateway, lambda: self.should_exit),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(settings.drain_timeout)),
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        )
        super().__init__(config)
        self._log = gateway.log

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: `stop` handles them."""
        yield

    def stop(self) -> None:
        # The second signal ends open requests immediately.
        self.force_exit = self.should_exit
        self.should_exit = True
        self._log.info("draining", seconds=self.config.timeout_graceful_shutdown)


def _connection_type(gateway: Gateway, draining: Callable[[], bool]) -> type[Connection]:
    """uvicorn creates connections itself, so what they share is in their class."""
    shared = {
        "slow_client_timeout": gateway.settings.slow_client_timeout,
        "max_connections": gateway.settings.max_connections,
        "budget": gateway.budget,
        "waiting": WaitingConnections(),
        "draining": staticmethod(draining),
        "report_invalid": staticmethod(partial(log_invalid, gateway)),
    }
    return type("Connection", (Connection,), shared)


def _client_options(settings: GatewaySettings) -> ClientOptions:
    options = ClientOptions(retry_timeout=settings.retry_timeout, resume_timeout=settings.resume_timeout)
    if settings.router_ca is not None:
        options["tls"] = TlsOptions(settings.router_ca, settings.router_certificate, settings.router_key)
    return options


def _check_certificate(settings: GatewaySettings) -> None:
    """Load the certificate before uvicorn does, whose errors do not name the files. Raises ValueError."""
    if settings.tls_certificate is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.tls_certificate, settings.tls_key)
    except OSError as error:
        files = f"tls_certificate {settings.tls_certificate} and tls_key {settings.tls_key}"
        raise ValueError(f"{files} cannot be used: {error}") from error


def _listen(settings: GatewaySettings) -> socket.socket:
    listener = inherited(os.environ)
    if listener is None:
        listener = bound(settings.host, settings.port)
        listener.listen(BACKLOG)
    return listener


async def _ready_to_share(gateway: Gateway, server: Server) -> None:
    """If other gateways accept connections of the same port, leave them to these until this gateway has a router."""
    while LISTENER_VARIABLE in os.environ and not (gateway.ready or server.should_exit):
        await asyncio.sleep(SHARE_SECONDS)


async def _watch(gateway: Gateway, server: Server, status: StatusFile, address: str) -> None:
    """Keep what the gateway knows about the routers, and the status file, up to date."""
    ask_at = 0.0
    while True:
        was_ready, gateway.ready = gateway.ready, await _has_router(gateway)
        if gateway.ready and (not was_ready or time.monotonic() >= ask_at):
            await _ask_about_ring(gateway)
            ask_at = time.monotonic() + ASK_SECONDS
        if gateway.ready != was_ready:
            if gateway.ready:
                gateway.log.info("ready", address=address, settings=changed_settings(gateway.settings))
            else:
                gateway.log.info("routers_lost", address=address)
        if server.should_exit:
            status.report(ServiceStatus("draining", address))
        elif gateway.ready:
            status.report(ServiceStatus("ready", address))
        await asyncio.sleep(TICK_SECONDS)


async def _has_router(gateway: Gateway) -> bool:
    with suppress(SluiceError):
        return await gateway.client.health(timeout=HEALTH_SECONDS)
    return False


async def _ask_about_ring(gateway: Gateway) -> None:
    """Ask which model the ring serves, and whether it needs a token."""
    # The timeout is needed because the client, once a router has answered, waits for lost routers to return.
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            models = await gateway.client.models()
        gateway.served_model = models[0].name if models else ""
        gateway.needs_token = False
    except (Unauthenticated, Forbidden):
        gateway.needs_token = True
    except (SluiceError, TimeoutError):
        pass  # What is known remains so until the next time.


async def _tick(beacon: ProgressBeacon) -> None:
    while True:
        beacon.touch()
        await asyncio.sleep(TICK_SECONDS)


def _unready(gateway: Gateway, server: Server) -> str | None:
    if server.should_exit:
        return "it is draining"
    return None if gateway.ready else "no router is ready"
