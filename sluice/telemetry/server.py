"""The small HTTP server of each service, for its status page, metrics and probes; see pages.py."""

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BufferedIOBase, BytesIO
from itertools import chain
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.headers import Headers
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer, make_server

from prometheus_client.metrics_core import Metric

from sluice.host.descriptors import exhausted, reserve
from sluice.host.ports import PortError
from sluice.settings.process import ProcessSettings
from sluice.telemetry.metrics import registry_of
from sluice.telemetry.pages import Page, Pages, PortOwner
from sluice.telemetry.probes import Health, Startup
from sluice.telemetry.service_status import ProgressBeacon
from sluice.telemetry.status_report import ServiceReport

# When more connections are opened, the oldest is closed: clients that send nothing must not lock out probes.
MAX_CONNECTIONS = 64
REQUEST_SECONDS = 10.0
"""Time limit of a request and its answer, and of the wait for a connection's next request."""
MAX_HEAD_BYTES = 1 << 14
"""Maximum size of a request line and its headers."""
RETRY_SECONDS = 0.05
"""Time until the next attempt to accept a connection if no file descriptor is free."""
END_SECONDS = 1.0
"""Time that the thread of a closed connection has to end."""


class Connections:
    """Open connections, each with a thread; limited in number and time. Thread-safe."""

    def __init__(self, limit: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """limit: number of connections. seconds: time limit of a request, including the wait for it."""
        self._seconds = seconds
        self._clock = clock
        self._free = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}
        """When each connection was opened or answered last, in this order."""

    def add(self, connection: socket.socket) -> bool:
        """Add a connection; at the limit, close the oldest one first. False if that one's thread does not end in
        time."""
        if not self._free.acquire(blocking=False):
            self.close_oldest()
            if not self._free.acquire(timeout=END_SECONDS):
                return False
        with self._lock:
            self._since[connection] = self._clock()
        return True

    def renew(self, connection: socket.socket) -> None:
        """Called by the thread of the connection when it has answered a request."""
        with self._lock:
            if self._since.pop(connection, None) is not None:
                self._since[connection] = self._clock()

    def remove(self, connection: socket.socket) -> None:
        """Called by the thread of the connection when it ends."""
        with self._lock:
            self._since.pop(connection, None)
        self._free.release()

    def close_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._since), None)
        if oldest is not None:
            self._close(oldest)

    def close_late(self) -> None:
        now = self._clock()
        with self._lock:
            late = [connection for connection, since in self._since.items() if now - since >= self._seconds]
        for connection in late:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        with self._lock:
            self._since.pop(connection, None)
        # Shut down, not close: that ends the blocking read of the connection's thread. If the client has closed the
        # connection, it raises OSError.
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class StatusServer:
    """Answers in separate threads, even if the service's loop hangs. Port 0: any free port.

    Raises PortError if the port cannot be opened.
    """

    def __init__(self, page: Page, host: str, port: int) -> None:
        self._pages = Pages(page)
        server: type[_Server] = _Server6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, self._pages, server, _Handler)
        except OSError as error:
            raise PortError(f"cannot serve metrics and health on {host} port {port}: {error}") from error
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="status", daemon=True)
        self._thread.start()

    def show(self, page: Page) -> None:
        """Replace the content of the pages."""
        self._pages.page = page

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class MetricsPort:
    """The metrics port of a service, which answers even before the service is ready. Does nothing if the setting
    metrics_port is 0.

    Raises PortError if the port cannot be opened.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        read_startup: Callable[[Startup], Iterable[Metric]] = lambda _: (),
    ) -> None:
        """`read_startup`: the metrics that the service has while it starts, and afterwards too."""
        self.startup = Startup()
        self._settings = settings
        self._owner = PortOwner.of(settings)
        self._read_startup = read_startup
        self._server: StatusServer | None = None
        if settings.metrics_port:
            page = Page(registry_of(lambda: read_startup(self.startup)), self.startup, self._owner)
            self._server = StatusServer(page, settings.metrics_host, settings.metrics_port)

    def show(
        self,
        beacon: ProgressBeacon,
        read_metrics: Callable[[], Iterable[Metric]],
        unready: Callable[[], str | None],
        report: Callable[[], ServiceReport | None] = lambda: None,
    ) -> None:
        """Call when the service has started: the pages then show the running service. The functions are called in
        threads of the port."""
        self.startup.end()
        if self._server is not None:
            health = Health(beacon, self._settings.live_stall, self._settings.ready_stall, unready)
            registry = registry_of(lambda: chain(self._read_startup(self.startup), read_metrics()))
            self._server.show(Page(registry, health, self._owner, report))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class _Answer(ServerHandler):
    """Writes one answer. After it, the connection may stay open."""

    headers: Headers

    def __init__(self, handler: "_Handler") -> None:
        super().__init__(BytesIO(), handler.wfile, handler.get_stderr(), handler.get_environ())  # type: ignore[arg-type]
        self.request_handler = handler

    def cleanup_headers(self) -> None:
        super().cleanup_headers()
        handler = self.request_handler
        # Without a length, the end of the connection is the end of the answer.
        handler.close_connection |= "Content-Length" not in self.headers
        self.http_version = "1.0" if handler.request_version == "HTTP/1.0" else "1.1"
        if handler.close_connection:
            self.headers["Connection"] = "close"


class _Handler(WSGIRequestHandler):
    """Answers the requests of a connection, which may be pipelined, one after the other."""

    protocol_version = "HTTP/1.1"
    # An answer is several small writes, which the kernel would delay on a connection that stays open.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: "_Server"

    def handle(self) -> None:
        received, self.close_connection = self.rfile, False
        while not self.close_connection and (head := _read_head(received)):
            self.rfile = BytesIO(head)
            self._answer_one()
            self.wfile.flush()
            self.server.connections.renew(self.connection)

    def _answer_one(self) -> None:
        self.raw_requestline = self.rfile.readline()
        if not self.parse_request():
            self.close_connection = True
            return
        # Answers to other methods may have no body, and bodies of requests are not read.
        if self.command != "GET" or "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True
        application: Any = self.server.get_app()
        _Answer(self).run(application)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """No line per probe."""


def _read_head(received: BufferedIOBase) -> bytes:
    """The next request up to its empty line. Empty if the connection ends before that, or if it is too long."""
    head, room = b"", MAX_HEAD_BYTES
    while (line := received.readline(room)).endswith(b"\n"):
        room -= len(line)
        # Empty lines before a request are ignored (RFC 9112, 2.2).
        head = (head + line).lstrip(b"\r\n")
        if head and line.strip(b"\r\n") == b"":
            return head
    return b""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS
    """Length of the queue of connections to accept. The default is 5, and while the queue is full, a probe takes a
    second or more to connect."""

    def __init__(self, *arguments: Any) -> None:
        self.connections = Connections(MAX_CONNECTIONS, REQUEST_SECONDS)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        # Not WSGIServer.server_bind, which looks up the host's name: that can take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if not exhausted(error):
                raise
        # The oldest connection's descriptor becomes free only when its thread ends, so accept with a reserved one.
        self.connections.close_oldest()
        try:
            with reserve():
                return super().get_request()
        except OSError:
            # The caller would retry immediately, in a busy loop.
            time.sleep(RETRY_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.add(request):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self.connections.remove(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.remove(request)

    def service_actions(self) -> None:
        """Called after each connection, and twice a second."""
        self.connections.close_late()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: a client that disconnects early is not an error of the service."""


class _Server6(_Server):
    address_family = socket.AF_INET6
