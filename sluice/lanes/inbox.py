"""The receiving end of a service's lanes. Drops malformed frames and reports gaps between the others."""

import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog
import zmq

from sluice.host.limited_log import LimitedLog
from sluice.host.socket_file import IN_USE, ListenError, SocketFile
from sluice.lanes.keys import KEYS_SECONDS, PLAIN, KeyPair, Security, ZapHandler
from sluice.lanes.lane import MAX_FRAME_BYTES, end_half_open, is_ipv6, open_frame
from sluice.wire.message import Message

MAX_KNOWN_LANES = 4096
"""Bounds the memory for lanes, because lane numbers are received from peers, which could forge any number of them."""
HANDSHAKE_MILLISECONDS = 5000
"""Timeout of a connection's handshake. Without it, silent connections would exhaust the file descriptors."""
MAX_RECEIVED_BYTES = 4 << 20
"""Bytes after which `receive` returns, so that large frames do not keep a service from its other work."""

M = TypeVar("M", bound=Message)


class Gap(NamedTuple):
    """Frames of a lane that were lost, or that were delivered to the predecessor of a restarted receiver."""

    lane: int
    missed: int
    """Number of missing frames."""
    lane_known: bool = True
    """Whether earlier frames of the lane were received here. If not, the predecessor may have received the frames."""


class Inbox(Generic[M]):
    """The receiving end of all lanes of a service. Not thread-safe.

    `messages`: the union of the message types that it accepts. `senders`: the only role that may send a type, by type;
    with keys, a message from another role is dropped as malformed, so that a holder of one service's key cannot act as
    a service of another role. Raises InsecureError for an address that must not be used, ListenError if it cannot be
    bound, ZMQError for a second inbox with keys in the same context.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        messages: type[M],
        capacity: int = 64,
        security: Security = PLAIN,
        senders: Mapping[type[Message], str] = MappingProxyType({}),
        max_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`max_bytes`: maximum size of a frame by the role of its sender, if it is known and the role has a limit."""
        security.check(address)
        self._senders = senders
        self._max_bytes = max_bytes
        self._log = LimitedLog(structlog.get_logger())
        self.malformed = 0
        self.gaps = 0
        """Number of gaps in lanes from which frames had been received before."""
        self._expected: OrderedDict[int, int] = OrderedDict()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.IPV6, is_ipv6(address))
        end_half_open(self._socket, sends=False)
        self._socket.set(zmq.RCVHWM, capacity)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        self._zap: ZapHandler | None = None
        self._keys = security.keys
        self._bound_with: KeyPair | None = None
        self._file: SocketFile | None = None
        self._keys_at = time.monotonic()
        self.address = address
        try:
            # The handler must exist before the bind, so that it can refuse the first connection.
            if self._keys is not None:
                self._zap = ZapHandler(context, self._socket, self._keys)
            path = _path(address)
            self._file = None if path is None else SocketFile(path)
            self._bind()
        except (zmq.ZMQError, ListenError):
            self.close()
            raise

    @property
    def fd(self) -> int:
        """Descriptor for an event loop. Edge-triggered: after each event, call `receive` until `waiting` is false."""
        return int(self._socket.get(zmq.FD))

    @property
    def waiting(self) -> bool:
        """Whether a frame can be received."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def refused(self) -> int:
        """Number of connections that were refused because their key is not admitted."""
        return self._zap.refused if self._zap is not None else 0

    def wait(self, seconds: float) -> bool:
        """Wait for a frame. Returns whether one can be received."""
        return bool(self._socket.poll(int(seconds * 1000), zmq.POLLIN))

    def receive(self, limit: int = 256) -> list[M | Gap]:
        """The messages that have arrived, oldest first. A gap precedes the message that revealed it. Never blocks.

        `limit`: maximum number of frames to read, including malformed ones. Fewer are read if they are large.
        """
        if self._keys is not None:
            self.renew()
        received: list[M | Gap] = []
        num_bytes = 0
        for _ in range(limit):
            if num_bytes >= MAX_RECEIVED_BYTES:
                break
            try:
                if self._keys is None:
                    frame = self._socket.recv(zmq.NOBLOCK)
                    num_bytes += len(frame)
                    self._accept(frame, received)
                else:
                    sealed = self._socket.recv(zmq.NOBLOCK, copy=False)
                    num_bytes += len(sealed)
                    # Not copied, because it may be large and not a frame at all.
                    self._accept(sealed.buffer, received, sealed)
            except zmq.Again:
                break
        return received

    def renew(self) -> None:
        """Bind again if the service's key has changed. `receive` calls this; services that rarely receive must too."""
        now = time.monotonic()
        if self._keys is None or now - self._keys_at < KEYS_SECONDS:
            return
        self._keys_at = now
        if self._bound_with is not None and self._bound_with != self._keys.own:
            # This also closes connections that use the former key. Their lanes reconnect with the new key.
            self._socket.unbind(self.address)
            self._bound_with = None
        if self._bound_with is None:
            try:
                self._bind()
            except ListenError as error:
                if not error.in_use:
                    raise

    def close(self) -> None:
        """Close the socket and remove an ipc file. Idempotent."""
        self._socket.close()
        if self._zap is not None:
            self._zap.join()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _bind(self) -> None:
        own = self._keys.own if self._keys is not None else None
        if own is not None:
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.set(zmq.CURVE_SECRETKEY, own.secret)
        listener = -1 if self._file is None else self._file.listen()
        try:
            # ZeroMQ takes ownership of this descriptor when it binds. -1: ZeroMQ creates one.
            self._socket.set(zmq.USE_FD, listener)
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            if listener >= 0:
                os.close(listener)
            in_use = error.errno == zmq.EADDRINUSE
            reason = IN_USE if in_use else zmq.strerror(error.errno or 0)
            raise ListenError(self.address, reason, in_use) from error
        self.address = bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode()
        self._bound_with = own

    def _accept(self, frame: bytes | memoryview, received: "list[M | Gap]", sealed: "zmq.Frame | None" = None) -> None:
        """`sealed`: the frame, if it came from the holder of a key."""
        role = "" if sealed is None else _role(sealed)
        if len(frame) > self._max_bytes.get(role, MAX_FRAME_BYTES):
            self._reject(f"{len(frame)} bytes, more than {self._max_bytes[role]}", sealed)
            return
        try:
            lane, number, encoded = open_frame(frame)
            message = self._decoder.decode(encoded)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            self._reject(f"malformed: {error}", sealed)
            return
        if role and self._senders.get(type(message), role) != role:
            self._reject(f"{type(message).__name__} from a peer with the key of another role", sealed)
            return
        # Numbers start at 0. Frames before the first one received here may have been delivered to a former receiver.
        known = lane in self._expected
        missed = number - self._expected.pop(lane, 0)
        if missed < 0:
            # ZeroMQ preserves the order of a lane, so a frame with an earlier number is forged or malformed.
            self._reject("a frame of this lane was sent before", sealed)
            self._expected[lane] = number - missed
            return
        self._expected[lane] = number + 1
        if len(self._expected) > MAX_KNOWN_LANES:
            self._expected.popitem(last=False)
        if missed:
            self.gaps += known
            received.append(Gap(lane, missed, known))
        received.append(message)

    def _reject(self, reason: str, sealed: "zmq.Frame | None") -> None:
        self.malformed += 1
        sender = {} if sealed is None else {"role": _role(sealed), "sender": _sender(sealed)}
        self._log.warning("frame_rejected", reason=reason, **sender)


def _role(sealed: zmq.Frame) -> str:
    """The role that `ZapHandler` has found for the sender's key."""
    return str(sealed.get("User-Id"))


def _sender(sealed: zmq.Frame) -> str:
    """The sender's IP address. Empty on this machine."""
    try:
        return str(sealed.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def _path(address: str) -> Path | None:
    """Path of the socket's file. None for other transports."""
    path = address.removeprefix("ipc://")
    return None if path == address or path.startswith("@") else Path(path)
