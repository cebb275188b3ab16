"""A lane: a bounded, numbered ZeroMQ pipe from one sender to one inbox that reports "full" and "gap".

Each service binds one `Inbox`; whoever sends to it opens a `Lane` of its own. A frame is a fixed header (magic,
version, the lane's epoch, the frame's number in it) and a MessagePack body. The receiver follows the numbers, so
whatever ZeroMQ loses (a peer that dies, a closed pipe) shows as a `Gap` at the next frame; senders with nothing to say
send a beat, so there is a next frame.

With keys all of it is CURVE: encrypted, and only known peers get in (`keys`, `zap`). Changed keys are taken up while
it runs: an inbox listens with the new one at once; a lane goes on as long as its connection does.
"""

import secrets
import struct
import time
from collections import OrderedDict
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec
import zmq

from sluice.ring.hangup import HangUp
from sluice.ring.keys import InsecureError, KeyPair, Security
from sluice.ring.message import VERSION, Message
from sluice.ring.zap import ZapHandler

MAGIC = b"SL"
HEADER = struct.Struct("<2sHQQ")
MAX_FRAME_BYTES = 32 << 20
MAX_FRAME_NUMBER = 1 << 40
"""At a thousand a second a lane needs 34 years for these."""
MAX_KNOWN_LANES = 4096
KEYS_SECONDS = 1.0
"""Between two looks at the key files."""
HANDSHAKE_SECONDS = 2.0
STUCK_SECONDS = 30.0
"""ZeroMQ gives up on a peer that once refused it. So a lane with keys that was not connected within the first of these,
or that takes nothing for the second, begins again."""
SILENT_MILLISECONDS = 5000
"""That a connection may take to say who it is."""
PLAIN = Security()
RECONNECT_SLOWLY = 500
"""Milliseconds; while keys are changed, connections fail by design."""

M = TypeVar("M", bound=Message)


class Gap(NamedTuple):
    """Frames of a lane that never came. After a restart of the receiver: those that went to its predecessor."""

    lane: int
    missed: int
    met: bool = True
    """Others of that lane came before. If not, these may have come too: to the one whose place this receiver took."""


class Lane:
    """The sending end. Not thread-safe.

    `capacity` is ZeroMQ's high-water mark in messages; its pipes and the kernel's buffers hold some more. With keys it
    takes messages only while it is connected. One that is `watched` sees its receiver hang up. Raises InsecureError
    for an address that must not be used, ZMQError for one that is none.
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
        self._socket = self._connect()

    def send(self, message: Message) -> bool:
        """Hand a message to ZeroMQ without waiting. False: the lane is full and the message stays with the caller."""
        frame = HEADER.pack(MAGIC, VERSION, self.epoch, self.sent) + self._encoder.encode(message)
        if not (self._try(frame) or (self.ready() and self._try(frame))):
            return False
        self.sent += 1
        return True

    def ready(self) -> bool:
        """Whether `send` would take a message now; cheap, so that nobody encodes a message for a full lane."""
        # A non-blocking send looks at the receiver's credits only every few million cycles; reading EVENTS always does.
        ready = bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT)
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
        self._socket.close(linger=int(linger * 1000))

    def _try(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _connect(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.PUSH)
        self._hang_up = HangUp(socket) if self._watched else None
        try:
            socket.set(zmq.IPV6, _is_ipv6(self.address))
            socket.set(zmq.SNDHWM, self._capacity)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RECONNECT_IVL, 50)
            socket.set(zmq.RECONNECT_IVL_MAX, 1000)
            if self._keys is None:
                socket.connect(self.address)
                return socket
            own, servers = self._keys
            # A message must not wait on a connection that will never be: of these only one can come about.
            socket.set(zmq.IMMEDIATE, 1)
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
                self._socket = self._connect()
                self._connected, self._moved_at = False, now

    def _current_keys(self) -> tuple[KeyPair, tuple[bytes, ...]] | None:
        keys, peer = self._security.keys, self._security.peer
        if keys is None:
            return None
        if peer is None:
            raise InsecureError(f"whose keys are at {self.address}?")
        return keys.own, keys.public(peer)


class Inbox(Generic[M]):
    """The receiving end of all lanes of a service. Not thread-safe.

    `messages` is a union of Message types; anything else, of another version or malformed, is dropped and counted.
    Raises InsecureError for an address that must not be used, ZMQError when it cannot be bound. With keys, one to a
    context.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        messages: type[M],
        capacity: int = 64,
        security: Security = PLAIN,
    ) -> None:
        security.check(address)
        self.malformed = 0
        self.gaps = 0
        """Times that frames of a lane that had been met never came."""
        self._expected: OrderedDict[int, int] = OrderedDict()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.IPV6, _is_ipv6(address))
        self._socket.set(zmq.RCVHWM, capacity)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.HANDSHAKE_IVL, SILENT_MILLISECONDS)
        self._zap: ZapHandler | None = None
        self._keys = security.keys
        self._bound_with: KeyPair | None = None
        self._keys_at = time.monotonic()
        self.address = address
        try:
            if self._keys is not None:
                self._zap = ZapHandler(context, self._socket, self._keys)
            self._bind()
        except zmq.ZMQError:
            self._close()
            raise

    @property
    def fd(self) -> int:
        """For an event loop. Edge-triggered: on every wake-up call `receive` until `waiting` is false."""
        return int(self._socket.get(zmq.FD))

    @property
    def waiting(self) -> bool:
        """Whether something can be received now."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def refused(self) -> int:
        """Attempts of peers without an admitted key to connect."""
        return self._zap.refused if self._zap is not None else 0

    def wait(self, seconds: float) -> bool:
        """Whether something can be received within this time."""
        return bool(self._socket.poll(int(seconds * 1000), zmq.POLLIN))

    def receive(self, limit: int = 256) -> list[M | Gap]:
        """What has arrived, oldest first; never waits. At most `limit` frames are looked at, malformed ones included.

        A gap stands before the frame that showed it.
        """
        if self._keys is not None:
            self.renew()
        received: list[M | Gap] = []
        for _ in range(limit):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._accept(frame, received)
        return received

    def renew(self) -> None:
        """Listen with the service's own key as it is now. `receive` does it; for who may not receive for long."""
        now = time.monotonic()
        if self._keys is None or now - self._keys_at < KEYS_SECONDS:
            return
        self._keys_at = now
        if self._bound_with is not None and self._bound_with != self._keys.own:
            # Connections that came about with the former key end with it; their lanes come back with the new one.
            self._socket.unbind(self.address)
            self._bound_with = None
        if self._bound_with is None:
            try:
                self._bind()
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise

    def close(self) -> None:
        """Close the socket and remove an ipc file."""
        self._close()
        path = _path(self.address)
        if path is not None:
            path.unlink(missing_ok=True)

    def _close(self) -> None:
        self._socket.close()
        if self._zap is not None:
            self._zap.join()

    def _bind(self) -> None:
        own = self._keys.own if self._keys is not None else None
        if own is not None:
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.set(zmq.CURVE_SECRETKEY, own.secret)
        path = _path(self.address)
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket.bind(self.address)
        if path is not None:
            path.chmod(0o600)
        self.address = bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode()
        self._bound_with = own

    def _accept(self, frame: bytes, received: "list[M | Gap]") -> None:
        try:
            magic, version, lane, number = HEADER.unpack_from(frame)
            if magic != MAGIC or version != VERSION or number > MAX_FRAME_NUMBER:
                raise ValueError("not a frame of this version")
            message = self._decoder.decode(memoryview(frame)[HEADER.size :])
        except (struct.error, ValueError, msgspec.MsgspecError, RecursionError):
            self.malformed += 1
            return
        met = lane in self._expected
        missed = number - self._expected.pop(lane, 0)
        if missed < 0:
            self.malformed += 1
            self._expected[lane] = number - missed
            return
        self._expected[lane] = number + 1
        if len(self._expected) > MAX_KNOWN_LANES:
            self._expected.popitem(last=False)
        if missed:
            self.gaps += met
            received.append(Gap(lane, missed, met))
        received.append(message)


def _is_ipv6(address: str) -> bool:
    return address.startswith("tcp://[")


def _path(address: str) -> Path | None:
    """Of the socket, where it is a file."""
    path = address.removeprefix("ipc://")
    return None if path == address or path.startswith("@") else Path(path)
