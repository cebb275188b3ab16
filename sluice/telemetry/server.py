"""The small HTTP server of each service: /metrics, /livez, /readyz."""

import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from sluice.ring.descriptors import exhausted, reserve
from sluice.telemetry.connections import Connections
from sluice.telemetry.health import Health

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse

    _Application = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]

MAX_CONNECTIONS = 64
"""With one more the oldest is closed."""
REQUEST_SECONDS = 10.0
"""That a connection has for its request and the answer to it."""
RETRY_SECONDS = 0.05
"""Until the next attempt to accept a connection where no descriptor is left."""


class StatusServer:
    """Answers in threads of its own, whatever the service's loop does. Raises OSError where it cannot listen.

    Port 0: any.
    """

    def __init__(self, registry: CollectorRegistry, health: Health, host: str, port: int) -> None:
        server: type[_Server] = _Server6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, _application(registry, health), server, _Handler)
        except OSError as error:
            raise OSError(f"cannot serve metrics and health on {host} port {port}: {error}") from error
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _application(registry: CollectorRegistry, health: Health) -> "_Application":
    metrics: _Application = make_wsgi_app(registry)
    probes = {"/livez": health.dead, "/readyz": health.not_ready}

    def answer(environ: dict[str, Any], start: "StartResponse") -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start)
        if path not in probes:
            return _text(start, "404 Not Found", "there are /metrics, /livez and /readyz")
        problem = probes[path]()
        return _text(start, "503 Service Unavailable", problem) if problem else _text(start, "200 OK", "ok")

    return answer


def _text(start: "StartResponse", status: str, text: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")])
    return [text.encode() + b"\n"]


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nobody wants a line for each probe."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS
    """More than the default of 5: where it is full, a probe waits a second and more to connect."""

    def __init__(self, *arguments: Any) -> None:
        self._connections = Connections(MAX_CONNECTIONS, REQUEST_SECONDS)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        # Not the parent's, which looks up the name of the host: that can take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if not exhausted(error):
                raise
        self._connections.close_oldest()
        try:
            with reserve():
                return super().get_request()
        except OSError:
            # Its caller would come back at once, and again and again.
            time.sleep(RETRY_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.add(request):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._connections.remove(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.remove(request)

    def service_actions(self) -> None:
        """Called after each connection, and twice a second."""
        self._connections.close_late()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no error of ours."""


class _Server6(_Server):
    address_family = socket.AF_INET6
