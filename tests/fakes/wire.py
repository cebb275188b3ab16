"""A connection between a lane and an inbox that tests can stall and cut while both ends keep running."""

import contextlib
import selectors
import socket
import threading
from pathlib import Path


class Wire:
    """A proxy, in a separate thread, that listens at ipc socket `near` and forwards to `far`."""

    def __init__(self, near: Path, far: Path) -> None:
        self._far = str(far)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(near))
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._held = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run)

    def hold(self) -> None:
        """Forward nothing more on any connection, until `cut`."""
        with self._lock:
            self._held = True

    def cut(self) -> None:
        """Close all connections, which loses what they held. New connections are forwarded."""
        with self._lock:
            for key in list(self._selector.get_map().values()):
                if key.fileobj is not self._listener:
                    self._end(key.fileobj)
            self._held = False

    def __enter__(self) -> "Wire":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stopped = True
        self._thread.join()
        self.cut()
        self._selector.close()
        self._listener.close()

    def _run(self) -> None:
        while not self._stopped:
            ready = self._selector.select(0.01)
            with self._lock:
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif not self._held and key.fileobj.fileno() >= 0:
                        self._carry(key.fileobj, key.data)

    def _accept(self) -> None:
        near, far = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
        try:
            far.connect(self._far)
        except OSError:
            # Nothing listens there at the moment. The other side will retry.
            near.close()
            far.close()
            return
        self._selector.register(near, selectors.EVENT_READ, far)
        self._selector.register(far, selectors.EVENT_READ, near)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        # Either connection may have been reset.
        with contextlib.suppress(OSError):
            if data := source.recv(1 << 16):
                sink.sendall(data)
                return
        for connection in (source, sink):
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()
