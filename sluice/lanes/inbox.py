"""The receiving end of a service's lanes. Drops malformed frames and reports gaps between the others."""

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog
import zmq

from sluice.host.limited_log import LimitedLog
from sluice.lanes.keys import PLAIN, Security
from sluice.lanes.lane import MAX_FRAME_BYTES, open_frame
from sluice.lanes.listener import Listener, sender_of
from sluice.wire.message import Message

MAX_KNOWN_LANES = 4096
"""Bounds the memory for lanes, because lane numbers are received from peers, which could forge any number of them."""
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
        self._senders = senders
        self._max_bytes = max_bytes
        self._log = LimitedLog(structlog.get_logger())
        self.malformed = 0
        self.gaps = 0
        """Number of gaps in lanes from which frames had been received before."""
        self._expected: OrderedDict[int, int] = OrderedDict()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._listener = Listener(
            context, zmq.PULL, address, security, capacity=capacity, max_frame_bytes=MAX_FRAME_BYTES, sends=False
        )
        self._socket = self._listener.socket
        self._keys = security.keys

    @property
    def address(self) -> str:
        """Where it is bound, without placeholders."""
        return self._listener.address

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
        return self._listener.refused

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
        self._listener.renew()

    def close(self) -> None:
        """Close the socket and remove an ipc file. Idempotent."""
        self._listener.close()

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
        sender = {} if sealed is None else {"role": _role(sealed), "sender": sender_of(sealed)}
        self._log.warning("frame_rejected", reason=reason, **sender)


def _role(sealed: zmq.Frame) -> str:
    """The role that `ZapHandler` has found for the sender's key."""
    return str(sealed.get("User-Id"))
