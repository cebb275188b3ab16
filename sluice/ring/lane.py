"""A lane: a bounded, numbered ZeroMQ pipe from one sender to one inbox that reports "full" and "gap".

Each service binds one `Inbox`; whoever sends to it opens a `Lane` of its own. A frame is a fixed header (magic,
version, the lane's epoch, the frame's number in it) and a MessagePack body. The receiver follows the numbers, so
whatever ZeroMQ loses (a peer that dies, a closed pipe) shows as a `Gap` at the next frame; senders with nothing to say
send a heartbeat, so there is a next frame.

With keys all of it is CURVE: encrypted, and only known peers get in (`keys`, `zap`). Changed keys are taken up while
it runs: an inbox listens with the new one at once; a lane goes on as long as its connection does.
"""

import secrets
import time

import msgspec
import zmq

from sluice.ring.descriptors import exhausted, kept_back
from sluice.ring.frame import header
from sluice.ring.hangup import HangUp
from sluice.ring.keys import KEYS_SECONDS, PLAIN, InsecureError, KeyPair, Security
from sluice.ring.message import Message

HANDSHAKE_SECONDS = 2.0
STUCK_SECONDS = 30.0
"""ZeroMQ gives up on a peer that once refused it. So a lane with keys that was not connected within the first of these,
or that takes nothing for the second, begins again."""
REOPEN_SECONDS = 0.25
"""Between two attempts to open a lane while there is no descriptor for it."""
RECONNECT_SLOWLY = 500
"""Milliseconds; while keys are changed, connections fail by design."""


class Lane:
    """The sending end. Not thread-safe.

    `capacity` is ZeroMQ's high-water mark in messages; its pipes and the kernel's buffers hold some more. It takes
    messages only while it is connected: until then, and after a connection ended, it is full. What it held when a
    connection ended is lost and shows as a gap. One that is `watched` sees its receiver hang up. While the process has
    no descriptor left for it, it is not `open` and not ready, and tries again. Raises InsecureError for an address that
    must not be used, ZMQError for an invalid one.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        capacity: int = 64,
        security: Security = PLAIN,
        *,
        watched: bool = False,
    ) -> None:
        security.check(address)
        self.address = address
        self.epoch = secrets.randbits(64)
        self.sent = 0
        self._context = context
        self._capacity = capacity
        self._security = security
        self._watched = watched
        self._hang_up: HangUp | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._keys = self._current_keys()
        self._keys_at = self._moved_at = time.monotonic()
        """When the key files were looked at; when it was opened, or last seen to take messages."""
        self._connected = False
        """It has taken messages since it was opened."""
        self._opened_at = time.monotonic()
        """When it was last tried."""
        self._socket = self._open()

    @property
    def open(self) -> bool:
        """Whether it has what it needs to connect."""
        return self._socket is not None

    def send(self, message: Message) -> bool:
        """Hand a message to ZeroMQ without waiting. False: the lane is full and the message stays with the caller."""
        frame = header(self.epoch, self.sent) + self._encoder.encode(message)
        if not (self._try(frame) or (self.ready() and self._try(frame))):
            return False
        self.sent += 1
        return True

    def ready(self) -> bool:
        """Whether `send` would take a message now; cheap, so that nobody encodes a message for a full lane."""
        socket = self._socket or self._reopen()
        if socket is None:
            return False
        # A non-blocking send looks at the receiver's credits only every few million cycles; reading EVENTS always does.
        ready = bool(int(socket.get(zmq.EVENTS)) & zmq.POLLOUT)
        if self._keys is not None:
            self._renew(ready)
        return ready

    def hung_up(self) -> bool:
        """See `HangUp.seen`; False where it is not watched."""
        return self._hang_up is not None and self._hang_up.seen()

    def close(self, linger: float = 0.0) -> None:
        """Close, after at most `linger` seconds for what ZeroMQ still holds."""
        if self._hang_up is not None:
            self._hang_up.close()
            self._hang_up = None
        if self._socket is not None:
            self._socket.close(linger=int(linger * 1000))

    def _try(self, frame: bytes) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _reopen(self) -> "zmq.Socket[bytes] | None":
        """Try again, if it is time."""
        now = time.monotonic()
        if now - self._opened_at >= REOPEN_SECONDS:
            self._opened_at = self._keys_at = self._moved_at = now
            self._keys = self._current_keys()
            self._socket = self._open()
        return self._socket

    def _open(self) -> "zmq.Socket[bytes] | None":
        """None where no descriptor is left, not even of those that are kept back."""
        try:
            return self._connect()
        except zmq.ZMQError as error:
            if not exhausted(error):
                raise
        try:
            with kept_back():
                return self._connect()
        except zmq.ZMQError as error:
            if not exhausted(error):
                raise
        return None

    def _connect(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.PUSH)
        try:
            self._hang_up = HangUp(socket) if self._watched else None
            socket.set(zmq.IPV6, is_ipv6(self.address))
            socket.set(zmq.SNDHWM, self._capacity)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RECONNECT_IVL, 50)
            socket.set(zmq.RECONNECT_IVL_MAX, 1000)
            # Messages must not wait on a connection that may never come: their sender would not see that the lane is
            # full until the pipe is, which takes a minute of pulses.
            socket.set(zmq.IMMEDIATE, 1)
            if self._keys is None:
                socket.connect(self.address)
                return socket
            own, servers = self._keys
            socket.set(zmq.CURVE_PUBLICKEY, own.public)
            socket.set(zmq.CURVE_SECRETKEY, own.secret)
            if len(servers) > 1:
                socket.set(zmq.RECONNECT_IVL, RECONNECT_SLOWLY)
            for server in servers:
                socket.set(zmq.CURVE_SERVERKEY, server)
                socket.connect(self.address)
        except zmq.ZMQError:
            if self._hang_up is not None:
                self._hang_up.close()
                self._hang_up = None
            socket.close()
            raise
        return socket

    def _renew(self, ready: bool) -> None:
        """If it is stuck, or keys have changed, begin again with those that count now. What it held shows as a gap."""
        now = time.monotonic()
        if ready:
            self._connected, self._moved_at = True, now
        elif now - self._keys_at >= KEYS_SECONDS:
            self._keys_at = now
            stuck = now - self._moved_at >= (STUCK_SECONDS if self._connected else HANDSHAKE_SECONDS)
            former, self._keys = self._keys, self._current_keys()
            if stuck or former != self._keys:
                self.close()
                self._opened_at = now
                self._socket = self._open()
                self._connected, self._moved_at = False, now

    def _current_keys(self) -> tuple[KeyPair, tuple[bytes, ...]] | None:
        keys, peer = self._security.keys, self._security.peer
        if keys is None:
            return None
        if peer is None:
            raise InsecureError(f"whose keys are at {self.address}?")
        return keys.own, keys.public(peer)


def is_ipv6(address: str) -> bool:
    """Whether ZeroMQ has to be told so."""
    return address.startswith("tcp://[")
