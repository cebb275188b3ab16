"""A bound socket of a service: its address, its keys and the connections that it admits."""

import os
import time
from pathlib import Path

import zmq

from sluice.host.socket_file import IN_USE, ListenError, SocketFile
from sluice.lanes.keys import KEYS_SECONDS, KeyPair, Security, ZapHandler
from sluice.lanes.lane import end_half_open, is_ipv6

HANDSHAKE_MILLISECONDS = 5000
"""Timeout of a connection's handshake. Without it, silent connections would exhaust the file descriptors."""


class Listener:
    """Not thread-safe.

    Raises InsecureError for an address that must not be used, ListenError if it cannot be bound, ZMQError for a second
    listener with keys in the same context.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        kind: int,
        address: str,
        security: Security,
        *,
        capacity: int,
        max_frame_bytes: int,
        sends: bool,
    ) -> None:
        """`kind`: type of the socket. `capacity`: high-water marks in messages. `sends`: whether it also answers."""
        security.check(address)
        self.address = address
        self.socket = context.socket(kind)
        self.socket.set(zmq.IPV6, is_ipv6(address))
        end_half_open(self.socket, sends=sends)
        self.socket.set(zmq.RCVHWM, capacity)
        self.socket.set(zmq.SNDHWM, capacity)
        self.socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        self.keys = security.keys
        self._zap: ZapHandler | None = None
        self._bound_with: KeyPair | None = None
        self._file: SocketFile | None = None
        self._keys_at = time.monotonic()
        try:
            if self.keys is not None:
                self._zap = ZapHandler(context, self.socket, self.keys)
            path = _path(address)
            self._file = None if path is None else SocketFile(path)
            self._bind()
        except (zmq.ZMQError, ListenError):
            self.close()
            raise

    @property
    def refused(self) -> int:
        """Number of connections that were refused because their key is not admitted."""
        return self._zap.refused if self._zap is not None else 0

    def renew(self) -> None:
        """Bind again if the service's key has changed. Call it regularly."""
        now = time.monotonic()
        if self.keys is None or now - self._keys_at < KEYS_SECONDS:
            return
        self._keys_at = now
        if self._bound_with is not None and self._bound_with != self.keys.own:
            # This also closes connections that use the former key. Peers reconnect with the new key.
            self.socket.unbind(self.address)
            self._bound_with = None
        if self._bound_with is None:
            try:
                self._bind()
            except ListenError as error:
                if not error.in_use:
                    raise

    def close(self) -> None:
        """Close the socket and remove an ipc file. Idempotent."""
        self.socket.close()
        if self._zap is not None:
            self._zap.join()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _bind(self) -> None:
        own = self.keys.own if self.keys is not None else None
        if own is not None:
            self.socket.set(zmq.CURVE_SERVER, 1)
            self.socket.set(zmq.CURVE_SECRETKEY, own.secret)
        listener = -1 if self._file is None else self._file.listen()
        try:
            # ZeroMQ takes ownership of this descriptor when it binds. -1: ZeroMQ creates one.
            self.socket.set(zmq.USE_FD, listener)
            self.socket.bind(self.address)
        except zmq.ZMQError as error:
            if listener >= 0:
                os.close(listener)
            in_use = error.errno == zmq.EADDRINUSE
            reason = IN_USE if in_use else zmq.strerror(error.errno or 0)
            raise ListenError(self.address, reason, in_use) from error
        self.address = bytes(self.socket.get(zmq.LAST_ENDPOINT)).decode()
        self._bound_with = own


def sender_of(sealed: zmq.Frame) -> str:
    """The IP address of the peer that sent a frame. Empty on this machine."""
    try:
        return str(sealed.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def _path(address: str) -> Path | None:
    """Path of the socket's file. None for other transports."""
    path = address.removeprefix("ipc://")
    return None if path == address or path.startswith("@") else Path(path)
