"""Authentication at an inbox with keys (ZAP, rfc.zeromq.org/spec/27): admits known keys and counts refusals."""

import secrets
import threading
import time

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from sluice.ring.keys import Keys

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"sluice"
WARN_SECONDS = 10.0
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""No CURVE handshake, one for another key than ours, or a key that is not admitted."""


class ZapHandler(threading.Thread):
    """Answers as long as the socket is open. Raises ZMQError if the context has a handler already."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", keys: Keys) -> None:
        super().__init__(name="zap", daemon=True)
        self.refused = 0
        self._keys = keys
        self._warned_at = -WARN_SECONDS
        self._log = structlog.get_logger()
        self._zap = context.socket(zmq.REP)
        self._zap.set(zmq.LINGER, 0)
        try:
            self._zap.bind(ZAP_ADDRESS)
        except zmq.ZMQError:
            self._zap.close()
            raise
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        # ZeroMQ's default name contains a descriptor number, which may be reused before the name is free.
        address = f"inproc://monitor.{secrets.token_hex(8)}"
        self._events = socket.get_monitor_socket(REFUSED | zmq.EVENT_MONITOR_STOPPED, address)
        self.start()

    def run(self) -> None:
        """The thread."""
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        live = True
        while live:
            for socket, _ in poller.poll():
                if socket is self._zap:
                    self._answer(*self._zap.recv_multipart())
                else:
                    live = self._count_refusal()
        # Closing alone releases the address only some time later.
        self._zap.unbind(ZAP_ADDRESS)
        self._zap.close()
        self._events.close()

    def _answer(self, version: bytes, number: bytes, *request: bytes) -> None:
        """`request`: domain, address, identity, mechanism, credentials."""
        mechanism, key = request[3], request[-1]
        role = self._keys.admits(z85.encode(key)) if mechanism == b"CURVE" and len(key) == 32 else None
        verdict = (b"200", b"OK", role.encode()) if role else (b"400", b"unknown key", b"")
        self._zap.send_multipart([version, number, *verdict, b""])

    def _count_refusal(self) -> bool:
        """Count a refusal. False once the socket has been closed."""
        event = int(parse_monitor_message(self._events.recv_multipart())["event"])
        if event == zmq.EVENT_MONITOR_STOPPED:
            return False
        self.refused += 1
        if time.monotonic() - self._warned_at >= WARN_SECONDS:
            self._warned_at = time.monotonic()
            reason = "unknown key" if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else "no key, or one for another inbox"
            self._log.warning("peers_refused", count=self.refused, latest=reason)
        return True
