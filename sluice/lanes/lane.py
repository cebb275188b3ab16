"""A lane: a bounded ZeroMQ pipe from one sender to one inbox whose frames are numbered. It reports "full" and "gap".

Each service binds one `Inbox`, and each sender opens a `Lane` to it. A frame is a fixed header (magic, version, the
lane's epoch, the frame's number) and a MessagePack body. The receiver checks that the numbers are consecutive, so that
frames that ZeroMQ loses (a peer dies, a pipe closes) become a `Gap` at the next frame. Idle senders send heartbeats or
keep-alives, so there is always a next frame.

With keys, lanes are encrypted by CURVE and only known peers are admitted (`keys`). Keys may change at runtime: an inbox
listens with its new key immediately; a lane keeps its connection and uses the new key for the next connection. In the
same way, a lane to a host name uses the name's new address for the next connection.
"""

import secrets
import struct
import time
from contextlib import nullcontext
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from sluice.host.descriptors import exhausted, reserve
from sluice.host.host_names import Endpoint, HostNames
from sluice.lanes.keys import KEYS_SECONDS, PLAIN, InsecureError, KeyPair, Security
from sluice.wire.message import VERSION, Message
from sluice.wire.timing import RECONNECT_SECONDS

# ZeroMQ never reconnects to a peer that refused the handshake. Therefore a lane with keys is reopened if it did not
# connect within HANDSHAKE_SECONDS, or if it accepted nothing for STUCK_SECONDS.
HANDSHAKE_SECONDS = 2.0
STUCK_SECONDS = 30.0
REOPEN_SECONDS = 0.25
"""Interval between attempts to open a lane while no file descriptor is available."""
RECONNECT_SLOWLY = 500
"""Reconnect interval in milliseconds while a peer has two keys, since one of the two connections always fails then."""
MAGIC = b"SL"
HEADER = struct.Struct("<2sHQQ")
MAX_FRAME_BYTES = 32 << 20
MAX_FRAME_NUMBER = 1 << 40
"""34 years at a thousand frames per second. A larger number is invalid, and would be reported as a gap of that size."""
EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED
"""Events of a watched lane. CLOSED: an attempt to connect failed."""
# An idle connection ends 25 s after the peer was last heard from: after 10 s and 3 unanswered probes, 5 s each.
KEEPALIVE = {
    zmq.SocketOption.TCP_KEEPALIVE: 1,
    zmq.SocketOption.TCP_KEEPALIVE_IDLE: 10,
    zmq.SocketOption.TCP_KEEPALIVE_INTVL: 5,
    zmq.SocketOption.TCP_KEEPALIVE_CNT: 3,
}
UNACKNOWLEDGED_MILLISECONDS = 20_000
"""Time until sent data must be acknowledged. Without it, the kernel retransmits for a quarter of an hour."""
CONNECT_MILLISECONDS = 5_000
"""Timeout of an attempt to connect. Without it, the kernel tries for two minutes."""


def header(lane: int, number: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, lane, number)


def open_frame(frame: bytes | memoryview) -> tuple[int, int, memoryview]:
    """The lane's epoch, the frame's number and the encoded message. Raises ValueError for a malformed frame."""
    if len(frame) < HEADER.size:
        raise ValueError(f"a frame must have at least {HEADER.size} bytes (got {len(frame)})")
    magic, version, lane, number = HEADER.unpack_from(frame)
    if magic != MAGIC or version != VERSION or number > MAX_FRAME_NUMBER:
        raise ValueError("not a frame of this version")
    return lane, number, memoryview(frame)[HEADER.size :]


class SendLane(Protocol):
    """The interface of `Lane`, which lanes in memory implement too."""

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
    """Whether the receiver's process has ended. Must be called regularly, see `Lane.hung_up`."""
    return lane.hung_up() and lane.refused_at is not None


class Lane:
    """The sending end of a lane. Not thread-safe.

    `capacity` is ZeroMQ's high-water mark in messages; its pipes and the kernel's buffers store some more. A lane that
    is not connected is full. Messages that it contained when its connection ended are lost, and the receiver sees a
    gap. A `watched` lane detects that its receiver closes the connection, which the kernel also does for a process that
    dies, and whether a process still listens at the address. If no file descriptor is available, the lane is neither
    `open` nor ready, and opening it is retried. Raises ValueError for an invalid address, InsecureError for an address
    that must not be used.
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
        """`names`: shared by several lanes, so that they share lookups."""
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
        """Events of the socket's monitor, see zmq_socket_monitor(3)."""
        self._disconnected = False
        """Whether a connection has ended and no new one has been established."""
        self._refused_at: float | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._keys = self._current_keys()
        self._checked_at = time.monotonic()
        """When the key files and the host name were last checked for changes."""
        self._moved_at = self._checked_at
        """When the lane was opened, or last seen to accept messages."""
        self._connected = False
        """Whether the lane has accepted messages since it was opened."""
        self._opened_at = self._checked_at
        """When the last attempt to open the lane was made."""
        try:
            self._socket = self._open()
        except zmq.ZMQError as error:
            raise ValueError(f"invalid address {address!r}: {error}") from error

    @property
    def open(self) -> bool:
        """False while no file descriptor is available."""
        return self._socket is not None or self._endpoint.text is None

    def send(self, message: Message) -> bool:
        """Send a message without blocking. Returns False if the lane is full and the message was not accepted."""
        # Frames are numbered only when they are sent, so that a message refused by a full lane leaves no gap.
        frame = header(self.epoch, self.sent) + self._encoder.encode(message)
        if not (self._try(frame) or (self.ready() and self._try(frame))):
            return False
        self.sent += 1
        self._connected, self._moved_at = True, time.monotonic()
        return True

    def ready(self) -> bool:
        """Whether `send` would accept a message now. Cheaper than encoding a message for a full lane."""
        socket = self._socket or self._reopen()
        if socket is None:
            return False
        # A non-blocking send checks for credit from the receiver only every few million CPU cycles; reading EVENTS
        # always does.
        ready = bool(int(socket.get(zmq.EVENTS)) & zmq.POLLOUT)
        if self._keys is not None or self._endpoint.named:
            self._renew(ready)
        return ready

    def hung_up(self) -> bool:
        """Whether the connection has ended and no new one has been established. False for a lane that is not watched.

        May be a false alarm while keys change, because connections with both keys are attempted in parallel. Must be
        called regularly: ZeroMQ's I/O thread blocks once a thousand events are unread.
        """
        while self._events is not None and int(self._events.get(zmq.EVENTS)) & zmq.POLLIN:
            self._on_event(recv_monitor_message(self._events)["event"])
        return self._disconnected

    @property
    def refused_at(self) -> float | None:
        """Monotonic time at which `hung_up` detected that the connection has ended and no process listens at the
        address any more, so that the receiver must have ended. None if it may still run.
        """
        # A receiver whose key changes closes its connections and may not listen for a moment.
        return None if self._refused_at is None or self._rotating() else self._refused_at

    def close(self, linger: float = 0.0) -> None:
        """Close the lane, after at most `linger` seconds for ZeroMQ to send its queued messages."""
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
            self._opened_at = self._checked_at = self._moved_at = now
            self._keys = self._current_keys()
            self._socket = self._open()
        return self._socket

    def _open(self) -> "zmq.Socket[bytes] | None":
        """A connected socket. None if no file descriptor is available, even a reserved one, or the IP is unknown."""
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
            # A restarted peer should be reconnected within a heartbeat. ZeroMQ doubles the interval up to the maximum.
            socket.set(zmq.RECONNECT_IVL, int(1000 * RECONNECT_SECONDS))
            socket.set(zmq.RECONNECT_IVL_MAX, 1000)
            # Without IMMEDIATE, ZeroMQ queues messages for a connection that may never be established, and the sender
            # would not notice until the queue is full, after a minute of keep-alives.
            socket.set(zmq.IMMEDIATE, 1)
            connect(socket, endpoint, self._keys)
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
        # The monitor must be disabled before the socket is closed.
        if self._events is not None:
            socket.disable_monitor()
            self._events.close()
        self._events, self._disconnected, self._refused_at = None, False, None

    def _renew(self, ready: bool) -> None:
        """Reopen the lane if it is stuck, or if its keys or the address of its host name changed.

        Messages that it contained are lost, and the receiver sees a gap.
        """
        now = time.monotonic()
        if ready:
            self._connected, self._moved_at = True, now
        elif now - self._checked_at >= KEYS_SECONDS:
            self._checked_at, full_seconds = now, now - self._moved_at
            stuck = full_seconds >= (STUCK_SECONDS if self._connected else HANDSHAKE_SECONDS)
            former, self._keys = self._keys, self._current_keys()
            # A lane that is full only for a moment needs no lookup.
            moved = full_seconds >= KEYS_SECONDS and self._endpoint.follow(try_next=stuck)
            if moved or former != self._keys or (stuck and self._keys is not None):
                self.close()
                self._opened_at = now
                self._socket = self._open()
                self._connected, self._moved_at = False, now

    def _current_keys(self) -> "LaneKeys | None":
        return current_keys(self._security, self.address)


LaneKeys = tuple[KeyPair, tuple[bytes, ...]]
"""The pair of this end, and the keys that the other end may have, the newest first."""


def current_keys(security: Security, address: str) -> LaneKeys | None:
    """None: without keys. Raises InsecureError if it is unknown whose key the other end should have."""
    keys, peer = security.keys, security.peer
    if keys is None:
        return None
    if peer is None:
        raise InsecureError(f"the role of the peer at {address} is unknown, so its key cannot be verified")
    return keys.own, keys.public(peer)


def connect(socket: "zmq.Socket[Any]", endpoint: str, keys: LaneKeys | None) -> None:
    """Connect with each key that the other end may have; one of the connections is established. Raises ZMQError."""
    if keys is None:
        socket.connect(endpoint)
        return
    own, servers = keys
    socket.set(zmq.CURVE_PUBLICKEY, own.public)
    socket.set(zmq.CURVE_SECRETKEY, own.secret)
    if len(servers) > 1:
        socket.set(zmq.RECONNECT_IVL, RECONNECT_SLOWLY)
    for server in servers:
        socket.set(zmq.CURVE_SERVERKEY, server)
        socket.connect(endpoint)


def is_ipv6(address: str) -> bool:
    """Whether the host is an IPv6 address, for which ZeroMQ needs an option."""
    return address.startswith("tcp://[")


def end_half_open(socket: "zmq.Socket[Any]", *, sends: bool) -> None:
    """Set timeouts for connections to a machine that has vanished, which sends nothing, not even a refusal. Call before
    the socket is bound or connected. Has no effect on ipc connections.

    These are TCP's mechanisms instead of ZeroMQ's heartbeats, because a suspended process does not answer ZeroMQ's: its
    connection would end too, and routers would consider the process dead. In either case, a connection ends if its
    receiver has read nothing for 20 s although all buffers are full.
    """
    for option, value in KEEPALIVE.items():
        socket.set(option, value)
    if sends:
        socket.set(zmq.TCP_MAXRT, UNACKNOWLEDGED_MILLISECONDS)
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
