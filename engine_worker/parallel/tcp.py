"""Commands over TCP, for ranks on several machines: a connection per follower, which sends a byte back for each command
that it is through with.

Nothing is encrypted, as nothing is between the ranks of a torch group: their network has to be theirs alone. Who
connects must show a token that only the group's store tells.
"""

import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from engine_worker.parallel.channel import HEADER, ChannelError, Part, take_command
from engine_worker.parallel.wakeup import SLICE_SECONDS

GREETING = struct.Struct("!16sI")
"""Token and rank."""
MAX_UNKNOWN = 256
"""Connections that have not said yet whose they are; with more, the one that has been silent longest is closed."""
INVITATION = "sluice/commands"
"""Where in the group's store the others find the listener."""
DONE = b"\1"


class Listener:
    """Rank 0's, before the others have connected."""

    def __init__(self, host: str) -> None:
        """`host`: where the others find this machine. Raises OSError."""
        # On rank 0's own machine its name may mean loopback.
        self._socket = socket.create_server(("", 0), family=_family(host), backlog=128)
        self._token = secrets.token_bytes(16)
        self._host = host

    @property
    def invitation(self) -> str:
        """What `connect` needs."""
        return f"{self._token.hex()} {self._socket.getsockname()[1]} {self._host}"

    def accept(self, size: int, seconds: float) -> list[socket.socket]:
        """Connections of ranks 1 to size - 1, in their order. Strangers are turned away, and nobody waits for those
        that say nothing. Raises ChannelError."""
        found: dict[int, socket.socket] = {}
        unknown: dict[socket.socket, bytes] = {}
        end = time.monotonic() + seconds
        self._socket.setblocking(False)
        with self._socket:
            while len(found) < size - 1 and (left := end - time.monotonic()) > 0:
                for ready in select.select([self._socket, *unknown], [], [], left)[0]:
                    if ready is self._socket:
                        self._admit(unknown)
                    elif ready in unknown and (greeting := _hear(ready, unknown)) is not None:
                        rank = self._rank(greeting)
                        if rank is None or not 0 < rank < size or rank in found:
                            ready.close()
                        else:
                            found[rank] = ready
        for connection in unknown:
            connection.close()
        if missing := sorted(set(range(1, size)) - found.keys()):
            raise ChannelError(f"ranks {missing} have not connected in {seconds:g} s")
        return [found[rank] for rank in sorted(found)]

    def _admit(self, unknown: dict[socket.socket, bytes]) -> None:
        with suppress(BlockingIOError, ConnectionError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            unknown[connection] = b""
        if len(unknown) > MAX_UNKNOWN:
            silent = next(iter(unknown))
            del unknown[silent]
            silent.close()

    def _rank(self, greeting: bytes) -> int | None:
        if len(greeting) < GREETING.size:
            return None
        token, rank = GREETING.unpack(greeting)
        return int(rank) if hmac.compare_digest(token, self._token) else None


class TcpSender:
    """See `Sender`."""

    def __init__(self, connections: Sequence[socket.socket], seconds: float) -> None:
        """`connections`: of ranks 1 and on; `seconds`: in which each must take a command."""
        self.sent = 0
        self._connections = connections
        # What waits on one object of a socket waits on no other one.
        self._ears = [connection.dup() for connection in connections]
        self._done = [0] * len(connections)
        self._gone = [False] * len(connections)
        self._sending = threading.Lock()
        for connection in connections:
            _tune(connection)
            connection.settimeout(seconds)
        for ear in self._ears:
            ear.setblocking(False)

    def send(self, parts: Sequence[Part]) -> None:
        """See `Sender`."""
        with self._sending:
            frame = b"".join((HEADER.pack(self.sent + 1, sum(map(len, parts))), *parts))
            for rank, connection in enumerate(self._connections, 1):
                try:
                    connection.sendall(frame)
                except OSError as error:
                    raise ChannelError(f"rank {rank} cannot be reached: {error}") from error
            self.sent += 1

    def idle(self) -> bool:
        """See `Sender`."""
        return not self._sending.locked()

    def done(self, rank: int) -> int:
        """See `Sender`."""
        self._hear(rank - 1)
        return self._done[rank - 1]

    def gone(self, rank: int) -> bool:
        """See `Sender`."""
        self._hear(rank - 1)
        return self._gone[rank - 1]

    def close(self) -> None:
        """See `Sender`."""
        for connection in (*self._connections, *self._ears):
            connection.close()

    def _hear(self, index: int) -> None:
        try:
            while told := self._ears[index].recv(4096):
                self._done[index] += len(told)
            self._gone[index] = True
        except BlockingIOError:
            pass
        except OSError:
            self._gone[index] = True


class TcpReceiver:
    """See `Receiver`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = 0
        _tune(connection)
        connection.settimeout(SLICE_SECONDS)

    def receive(self, seconds: float) -> bytearray:
        """See `Receiver`."""
        message = take_command(self._received + 1, lambda size: self._take(size, seconds))
        self._received += 1
        return message

    def fileno(self) -> int:
        """See `Receiver`."""
        return self._socket.fileno()

    def finish(self) -> None:
        """See `Receiver`. That rank 0 has gone is told by the next `receive`."""
        try:
            self._socket.send(DONE)
        except OSError:
            return

    def close(self) -> None:
        """See `Receiver`."""
        self._socket.close()

    def _take(self, size: int, seconds: float) -> bytearray:
        """In looks of SLICE_SECONDS: time in which this process itself stood still does not count."""
        out = bytearray(size)
        rest, silent = memoryview(out), 0.0
        while rest:
            try:
                count = self._socket.recv_into(rest)
            except TimeoutError:
                silent += SLICE_SECONDS
                if silent >= seconds:
                    raise ChannelError(f"rank 0 has sent nothing for {seconds:g} s") from None
                continue
            except OSError as error:
                raise ChannelError(f"rank 0 has gone: {error}") from error
            if not count:
                raise ChannelError("rank 0 has gone")
            rest, silent = rest[count:], 0.0
        return out


def connect(invitation: str, rank: int, seconds: float) -> TcpReceiver:
    """A follower's end. Raises ChannelError."""
    token, port, host = invitation.split(" ", 2)
    try:
        connection = socket.create_connection((host, int(port)), seconds)
        connection.sendall(GREETING.pack(bytes.fromhex(token), rank))
    except OSError as error:
        raise ChannelError(f"rank 0 cannot be reached at {host}:{port}: {error}") from error
    return TcpReceiver(connection)


def _hear(connection: socket.socket, unknown: dict[socket.socket, bytes]) -> bytes | None:
    """Its greeting, shorter where it has gone, and then no more among the unknown; None: there is more to come."""
    greeting = unknown.pop(connection)
    try:
        part = connection.recv(GREETING.size - len(greeting))
    except OSError:
        return greeting
    greeting += part
    if not part or len(greeting) == GREETING.size:
        return greeting
    unknown[connection] = greeting
    return None


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
