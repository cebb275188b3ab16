"""A lane: a bounded, numbered ZeroMQ pipe from one sender to one inbox that reports "full" and "gap".

Each service binds one `Inbox`, and each sender opens its own `Lane` to it. A frame is a fixed header (magic, version,
the lane's epoch, the frame's number) and a MessagePack body. The receiver checks that the numbers are consecutive, so
whatever ZeroMQ loses (a peer dies, a pipe closes) shows as a `Gap` at the next frame. Idle senders send heartbeats or
keep-alives, so there is always a next frame.

With keys, lanes are encrypted by CURVE and only known peers are admitted (`keys`). Keys may change at runtime:
an inbox listens with its new key at once; a lane keeps its connection and uses the new key for the next one. So does
a lane to a name with the name's new address.
"""

import secrets
import struct
import time
from contextlib import nullcontext
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from sluice.ring.descriptors import exhausted, reserve
from sluice.ring.half_open import end_half_open
from sluice.ring.host_names import Endpoint, HostNames
from sluice.ring.keys import KEYS_SECONDS, PLAIN, InsecureError, KeyPair, Security
from sluice.ring.message import VERSION, Message
from sluice.ring.timing import RECONNECT_SECONDS

# ZeroMQ never retries a peer that refused the handshake, so a lane with keys is reopened if it was not connected within
# HANDSHAKE_SECONDS, or accepted nothing for STUCK_SECONDS.
HANDSHAKE_SECONDS = 2.0
STUCK_SECONDS = 30.0
REOPEN_SECONDS = 0.25
"""Between two attempts to open a lane while no file descriptor is left."""
# Milliseconds. While a peer has two keys, one of the two connections fails by design.
RECONNECT_SLOWLY = 500
MAGIC = b"SL"
HEADER = struct.Struct("<2sHQQ")
MAX_FRAME_BYTES = 32 << 20
# 34 years at a thousand frames per second: a larger number is garbage, and would make a gap of that size.
MAX_FRAME_NUMBER = 1 << 40
EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED
"""CLOSED: an attempt to connect failed."""


def header(lane: int, number: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, lane, number)


def open_frame(frame: bytes) -> tuple[int, int, memoryview]:
    """The lane's epoch, the frame's number and the encoded message. Raises ValueError for a malformed frame."""
    if len(frame) < HEADER.size:
        raise ValueError("shorter than a header")
    magic, version, lane, number = HEADER.unpack_from(frame)
    if magic != MAGIC or version != VERSION or number > MAX_FRAME_NUMBER:
        raise ValueError("not a frame of this version")
    return lane, number, memoryview(frame)[HEADER.size :]


class SendLane(Protocol):
    """The interface of `Lane`, for lanes in memory."""

    @property
    def open(self) -> bool: ...

    def ready(self) -> bool: ...

    def send(self, message: Message) -> bool: ...

    def close(self, linger: float = 0.0) -> None: ...


class WatchedLane(SendLane, Protocol):
    """The interface of a watched `Lane`."""

    @property
    def refused_at(self) -> float | None: ...

    def hung_up(self) -> bool: ...


def has_ended(lane: WatchedLane) -> bool:
    """Whether the receiver's process has ended. To be called regularly, as `Lane.hung_up`, which it calls."""
    return lane.hung_up() and lane.refused_at is not None


class Lane:
    """The sending end. Not thread-safe.

    `capacity` is ZeroMQ's high-water mark in messages; its pipes and the kernel's buffers hold some more. A lane that
    is not connected is full. What it held when its connection ended is lost and shows as a gap at the receiver.
    A `watched` lane notices when its receiver closes the connection, which the kernel also does for a process that
    dies, and whether anybody still listens at the address then. Without a free file descriptor it is neither `open` nor
    ready, and tries again. Raises ValueError for an invalid address, InsecureError for one that must not be used.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        capacity: int = 64,
        security: Security = PLAIN,
        *,
        watched: bool = False,
        names: HostNames | None = None,
    ) -> None:
        """`names`, shared by lanes, saves look-ups: a new lane knows what an earlier one found."""
        security.check(address)
        self.address = address
        self._endpoint = Endpoint(address, names or HostNames())
        self.epoch = secrets.randbits(64)
        self.sent = 0
        self._context = context
        self._capacity = capacity
        self._security = security
        self._watched = watched
        self._events: zmq.Socket[bytes] | None = None
        """Of the socket's monitor (zmq_socket_monitor(3))."""
        self._disconnected = False
        """Whether a connection ended, and none was made since then."""
        self._refused_at: float | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._keys = self._current_keys()
        self._looked_at = self._moved_at = time.monotonic()
        """When it last looked at key files and its name; when it was opened, or last seen to accept messages."""
        self._connected = False
        """It has accepted messages since it was opened."""
        self._opened_at = self._looked_at
        """When opening was last tried."""
        try:
            self._socket = self._open()
        except zmq.ZMQError as error:
            raise ValueError(f"invalid address {address!r}: {error}") from error

    @property
    def open(self) -> bool:
        """False while no file descriptor is left."""
        return self._socket is not None or self._endpoint.text is None

    def send(self, message: Message) -> bool:
        """Never blocks. False: the lane is full and the message was not taken."""
        # Frames are numbered only as they are sent, so a message that a full lane refused leaves no gap.
        frame = header(self.epoch, self.sent) + self._encoder.encode(message)
        if not (self._try(frame) or (self.ready() and self._try(frame))):
            return False
        self.sent += 1
        self._connected, self._moved_at = True, time.monotonic()
        return True

    def ready(self) -> bool:
        """Whether `send` would accept a message now. Cheap, unlike encoding a message for a full lane."""
        socket = self._socket or self._reopen()
        if socket is None:
            return False
        # A non-blocking send checks the receiver's credit only every few million cycles; reading EVENTS always does.
        ready = bool(int(socket.get(zmq.EVENTS)) & zmq.POLLOUT)
        if self._keys is not None or self._endpoint.named:
            self._renew(ready)
        return ready

    def hung_up(self) -> bool:
        """Whether the connection ended, and none came after it. May be a false alarm while keys change, because
        connections with both keys are tried side by side. False for a lane that is not watched.

        Must be called regularly: ZeroMQ's I/O thread blocks once a thousand events are unread.
        """
        while self._events is not None and int(self._events.get(zmq.EVENTS)) & zmq.POLLIN:
            self._on_event(recv_monitor_message(self._events)["event"])
        return self._disconnected

    @property
    def refused_at(self) -> float | None:
        """When `hung_up` learned, on the monotonic clock, that a connection ended and no process listens at the address
        any more: the receiver has ended. None if it may live.
        """
        # A receiver whose key changes closes its connections, and may not listen for a moment.
        return None if self._refused_at is None or self._rotating() else self._refused_at

    def close(self, linger: float = 0.0) -> None:
        """Close, after at most `linger` seconds to send what ZeroMQ still holds."""
        if self._socket is not None:
            self._stop_watching(self._socket)
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
        now = time.monotonic()
        if self._endpoint.follow() or now - self._opened_at >= REOPEN_SECONDS:
            self._opened_at = self._looked_at = self._moved_at = now
            self._keys = self._current_keys()
            self._socket = self._open()
        return self._socket

    def _open(self) -> "zmq.Socket[bytes] | None":
        """None if no file descriptor is left, not even a reserved one, or if the name's address is not known yet."""
        endpoint = self._endpoint.text
        if endpoint is None:
            return None
        for descriptors in (nullcontext, reserve):
            try:
                with descriptors():
                    return self._connect(endpoint)
            except zmq.ZMQError as error:
                if not exhausted(error):
                    raise
        return None

    def _connect(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.PUSH)
        try:
            if self._watched:
                # ZeroMQ's default name contains a descriptor number, which may be reused before the name is free.
                self._events = socket.get_monitor_socket(EVENTS, f"inproc://monitor.{secrets.token_hex(8)}")
            socket.set(zmq.IPV6, is_ipv6(endpoint))
            end_half_open(socket, sends=True)
            socket.set(zmq.SNDHWM, self._capacity)
            socket.set(zmq.LINGER, 0)
            # A peer that is restarted should be back within a heartbeat; ZeroMQ doubles this up to the maximum.
            socket.set(zmq.RECONNECT_IVL, int(1000 * RECONNECT_SECONDS))
            socket.set(zmq.RECONNECT_IVL_MAX, 1000)
            # Without it ZeroMQ queues messages for a connection that may never come, and the sender would notice only
            # when that queue is full: after a minute of keep-alives.
            socket.set(zmq.IMMEDIATE, 1)
            if self._keys is None:
                socket.connect(endpoint)
                return socket
            own, servers = self._keys
            socket.set(zmq.CURVE_PUBLICKEY, own.public)
            socket.set(zmq.CURVE_SECRETKEY, own.secret)
            if len(servers) > 1:
                socket.set(zmq.RECONNECT_IVL, RECONNECT_SLOWLY)
            for server in servers:
                socket.set(zmq.CURVE_SERVERKEY, server)
                socket.connect(endpoint)
        except zmq.ZMQError:
            self._stop_watching(socket)
            socket.close()
            raise
        return socket

    def _on_event(self, event: int) -> None:
        match event:
            case zmq.Event.DISCONNECTED:
                self._disconnected = True
            case zmq.Event.HANDSHAKE_SUCCEEDED:
                self._disconnected, self._refused_at = False, None
            case zmq.Event.CLOSED if self._disconnected and self._refused_at is None:
                self._refused_at = time.monotonic()

    def _rotating(self) -> bool:
        keys = self._current_keys()
        return keys is not None and len(keys[1]) > 1

    def _stop_watching(self, socket: "zmq.Socket[bytes]") -> None:
        # Before the socket is closed: afterwards its monitor cannot be disabled.
        if self._events is not None:
            socket.disable_monitor()
            self._events.close()
        self._events, self._disconnected, self._refused_at = None, False, None

    def _renew(self, ready: bool) -> None:
        """Reopen the lane if it is stuck, or its keys or its name's address changed. What it held shows as a gap."""
        now = time.monotonic()
        if ready:
            self._connected, self._moved_at = True, now
        elif now - self._looked_at >= KEYS_SECONDS:
            self._looked_at, stopped = now, now - self._moved_at
            stuck = stopped >= (STUCK_SECONDS if self._connected else HANDSHAKE_SECONDS)
            former, self._keys = self._keys, self._current_keys()
            # A lane that is full for a moment asks no DNS.
            moved = stopped >= KEYS_SECONDS and self._endpoint.follow(try_next=stuck)
            if moved or former != self._keys or (stuck and self._keys is not None):
                self.close()
                self._opened_at = now
                self._socket = self._open()
                self._connected, self._moved_at = False, now

    def _current_keys(self) -> tuple[KeyPair, tuple[bytes, ...]] | None:
        keys, peer = self._security.keys, self._security.peer
        if keys is None:
            return None
        if peer is None:
            raise InsecureError(f"unknown role of the peer at {self.address}: no key to check it by")
        return keys.own, keys.public(peer)


def is_ipv6(address: str) -> bool:
    """Whether the host is an IPv6 literal, for which ZeroMQ needs an option."""
    return address.startswith("tcp://[")
