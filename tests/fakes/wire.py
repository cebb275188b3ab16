"""A way between a lane and an inbox that can be held up and cut, while both of its ends live."""

import contextlib
import selectors
import socket
import threading
from pathlib import Path


class Wire:
    """Carries bytes between the ipc sockets `near`, where it listens, and `far`. A thread of its own does it."""

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
        """Carry nothing more on the connections that are there."""
        with self._lock:
            self._held = True

    def cut(self) -> None:
        """End all connections; what they held is lost. New ones are carried."""
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
            # Nobody listens there now: the other side tries again.
            near.close()
            far.close()
            return
        self._selector.register(near, selectors.EVENT_READ, far)
        self._selector.register(far, selectors.EVENT_READ, near)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        # One of them may have been reset.
        with contextlib.suppress(OSError):
            if data := source.recv(1 << 16):
                sink.sendall(data)
                return
        for each in (source, sink):
            self._end(each)

    def _end(self, end: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(end)
        end.close()
