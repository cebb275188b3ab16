"""A lane: a bounded, numbered ZeroMQ pipe from one sender to one inbox that reports "full" and "gap".

Each service binds one `Inbox`; whoever sends to it opens a `Lane` of its own. A frame is a fixed header (magic,
version, the lane's epoch, the frame's number in it) and a MessagePack body. The receiver follows the numbers, so
whatever ZeroMQ loses (a peer that dies, a closed pipe) shows as a `Gap` at the next frame; senders with nothing to say
send a beat, so there is a next frame.
"""

import os
import secrets
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec
import zmq

from sluice.ring.wire import VERSION, Message

MAGIC = b"SL"
HEADER = struct.Struct("<2sHQQ")
MAX_FRAME_BYTES = 64 << 20
MAX_KNOWN_LANES = 4096

M = TypeVar("M", bound=Message)


class Gap(NamedTuple):
    """Frames of a lane that never came. After a restart of the receiver: those that went to its predecessor."""

    lane: int
    missed: int


class Lane:
    """The sending end. Not thread-safe.

    `capacity` is ZeroMQ's high-water mark in messages; its pipes and the kernel's buffers hold some more.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, capacity: int = 64) -> None:
        self.address = address
        self.epoch = secrets.randbits(64)
        self.sent = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.IPV6, _is_ipv6(address))
        self._socket.set(zmq.SNDHWM, capacity)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(address)

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
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT)

    def close(self, linger: float = 0.0) -> None:
        """Close, after at most `linger` seconds for what ZeroMQ still holds."""
        self._socket.close(linger=int(linger * 1000))

    def _try(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class Inbox(Generic[M]):
    """The receiving end of all lanes of a service. Not thread-safe.

    `messages` is a union of Message types; anything else, of another version or malformed, is dropped and counted.
    Raises ZMQError when the address cannot be bound.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        messages: type[M],
        capacity: int = 64,
    ) -> None:
        self.malformed = 0
        self.gaps = 0
        self._expected: OrderedDict[int, int] = OrderedDict()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.IPV6, _is_ipv6(address))
        self._socket.set(zmq.RCVHWM, capacity)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.set(zmq.LINGER, 0)
        _make_folder(address)
        self._socket.bind(address)
        self.address = bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode()

    @property
    def fd(self) -> int:
        """For an event loop. Edge-triggered: on every wake-up call `receive` until it returns nothing."""
        return int(self._socket.get(zmq.FD))

    def wait(self, seconds: float) -> bool:
        """Whether something can be received within this time."""
        return bool(self._socket.poll(int(seconds * 1000), zmq.POLLIN))

    def receive(self, limit: int = 256) -> list[M | Gap]:
        """What has arrived, at most about `limit` messages, oldest first; never waits.

        A gap stands before the frame that showed it.
        """
        received: list[M | Gap] = []
        while len(received) < limit:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._accept(frame, received)
        return received

    def close(self) -> None:
        """Close the socket and remove an ipc file."""
        self._socket.close()
        if self.address.startswith("ipc://"):
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _accept(self, frame: bytes, received: "list[M | Gap]") -> None:
        try:
            magic, version, lane, number = HEADER.unpack_from(frame)
            if magic != MAGIC or version != VERSION:
                raise ValueError("not a frame of this version")
            message = self._decoder.decode(memoryview(frame)[HEADER.size :])
        except (struct.error, ValueError, msgspec.MsgspecError, RecursionError):
            self.malformed += 1
            return
        missed = number - self._expected.pop(lane, 0)
        if missed < 0:
            self.malformed += 1
            self._expected[lane] = number - missed
            return
        self._expected[lane] = number + 1
        if len(self._expected) > MAX_KNOWN_LANES:
            self._expected.popitem(last=False)
        if missed:
            self.gaps += 1
            received.append(Gap(lane, missed))
        received.append(message)


def _is_ipv6(address: str) -> bool:
    return address.startswith("tcp://[")


def _make_folder(address: str) -> None:
    if address.startswith("ipc://"):
        os.makedirs(os.path.dirname(address.removeprefix("ipc://")) or ".", exist_ok=True)
