"""Where the lanes of a service end: drops malformed frames, and reports gaps between the others."""

import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec
import zmq

from sluice.ring.half_open import end_half_open
from sluice.ring.keys import KEYS_SECONDS, PLAIN, KeyPair, Security, ZapHandler
from sluice.ring.lane import MAX_FRAME_BYTES, is_ipv6, open_frame
from sluice.ring.message import Message
from sluice.ring.socket_file import IN_USE, ListenError, SocketFile

# Lane numbers come off the wire: without a bound, forged ones would fill the memory.
MAX_KNOWN_LANES = 4096
# For the handshake of a connection: otherwise silent ones would use up the descriptors.
HANDSHAKE_MILLISECONDS = 5000

M = TypeVar("M", bound=Message)


class Gap(NamedTuple):
    """Frames of a lane that were lost, or, after a restart of the receiver, that went to its predecessor."""

    lane: int
    missed: int
    lane_known: bool = True
    """Earlier frames of that lane came here. If not, the missing ones may have gone to the predecessor."""


class Inbox(Generic[M]):
    """The receiving end of all lanes of a service: a union of message types. Not thread-safe.

    Raises InsecureError for an address that must not be used, ListenError if it cannot be bound, ZMQError for a second
    inbox with keys in the same context.
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
        """Gaps in lanes from which frames had come before."""
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
            # Before the bind: from the first connection on, the handler must be there to refuse it.
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
        """For an event loop. Edge-triggered: at every wake-up call `receive` until `waiting` is false."""
        return int(self._socket.get(zmq.FD))

    @property
    def waiting(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def refused(self) -> int:
        """Connections refused because their key is not admitted."""
        return self._zap.refused if self._zap is not None else 0

    def wait(self, seconds: float) -> bool:
        """Whether a frame can be received within this time."""
        return bool(self._socket.poll(int(seconds * 1000), zmq.POLLIN))

    def receive(self, limit: int = 256) -> list[M | Gap]:
        """What has arrived, oldest first; a gap before the frame that revealed it. Never blocks. `limit` includes
        malformed frames."""
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
        """Bind again if the service's own key has changed. `receive` calls it; a service that rarely does must too."""
        now = time.monotonic()
        if self._keys is None or now - self._keys_at < KEYS_SECONDS:
            return
        self._keys_at = now
        if self._bound_with is not None and self._bound_with != self._keys.own:
            # This also closes connections made with the former key; their lanes reconnect with the new one.
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
            # ZeroMQ takes ownership of this descriptor when it binds; -1: it makes one.
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

    def _accept(self, frame: bytes, received: "list[M | Gap]") -> None:
        try:
            lane, number, encoded = open_frame(frame)
            message = self._decoder.decode(encoded)
        except (ValueError, msgspec.MsgspecError, RecursionError):
            self.malformed += 1
            return
        # Numbers begin at 0. What is missing before the first frame here may have gone to a former receiver.
        known = lane in self._expected
        missed = number - self._expected.pop(lane, 0)
        if missed < 0:
            # ZeroMQ keeps the order of a lane, so a number from the past is not its next frame.
            self.malformed += 1
            self._expected[lane] = number - missed
            return
        self._expected[lane] = number + 1
        if len(self._expected) > MAX_KNOWN_LANES:
            self._expected.popitem(last=False)
        if missed:
            self.gaps += known
            received.append(Gap(lane, missed, known))
        received.append(message)


def _path(address: str) -> Path | None:
    """Of the socket's file; None for other transports."""
    path = address.removeprefix("ipc://")
    return None if path == address or path.startswith("@") else Path(path)
