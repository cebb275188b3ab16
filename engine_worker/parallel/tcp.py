"""Commands over TCP, for ranks on several machines: one connection per follower, which sends a byte back for each
command that it has completed.

Neither these connections nor those of torch's group are encrypted: the ranks need a private network
(docs/decisions/0010-commands-between-machines.md). A peer must present a token that is published only in the group's
store.
"""

import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from engine_worker.parallel.channel import SLICE_SECONDS, ChannelError, ChannelReceiver, ChannelSender

HANDSHAKE = struct.Struct("!16sI")
"""Token and rank."""
# More than there are ranks, and well below the 1024 descriptors that select() supports.
MAX_PENDING = 256
"""Limit on connections without a complete handshake; beyond it the oldest one is closed."""
ENDPOINT_KEY = "sluice/commands"
"""Key of the listener's endpoint in the group's store."""
ACK = b"\1"


class RankListener:
    """Accepts the connections of the other ranks, on rank 0."""

    def __init__(self, host: str) -> None:
        """`host`: address at which the other ranks reach this machine. Raises OSError."""
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        # Bound to all interfaces, since on this machine its host name may resolve to loopback.
        self._socket = socket.create_server(("", 0), family=family, backlog=128)
        self._token = secrets.token_bytes(16)
        self._host = host

    @property
    def endpoint(self) -> str:
        """Token, port and host, for `connect`."""
        return f"{self._token.hex()} {self._socket.getsockname()[1]} {self._host}"

    def accept(self, size: int, seconds: float) -> list[socket.socket]:
        """Wait for the connections of ranks 1 to size - 1, and return them in order. Unauthorized and silent peers do
        not delay them. Raises ChannelError after `seconds`."""
        accepted: dict[int, socket.socket] = {}
        pending: dict[socket.socket, bytes] = {}
        end = time.monotonic() + seconds
        self._socket.setblocking(False)
        with self._socket:
            while len(accepted) < size - 1 and (left := end - time.monotonic()) > 0:
                for ready in select.select([self._socket, *pending], [], [], left)[0]:
                    if ready is self._socket:
                        self._accept_one(pending)
                    elif ready in pending and (handshake := _read_handshake(ready, pending)) is not None:
                        rank = self._rank(handshake)
                        if rank is None or not 0 < rank < size or rank in accepted:
                            ready.close()
                        else:
                            accepted[rank] = ready
        for connection in pending:
            connection.close()
        if missing := sorted(set(range(1, size)) - accepted.keys()):
            raise ChannelError(f"ranks {missing} have not connected in {seconds:g} s")
        return [accepted[rank] for rank in sorted(accepted)]

    def _accept_one(self, pending: dict[socket.socket, bytes]) -> None:
        with suppress(BlockingIOError, ConnectionError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            pending[connection] = b""
        if len(pending) > MAX_PENDING:
            oldest = next(iter(pending))
            del pending[oldest]
            oldest.close()

    def _rank(self, handshake: bytes) -> int | None:
        """None if the handshake is incomplete, or its token is wrong."""
        if len(handshake) < HANDSHAKE.size:
            return None
        token, rank = HANDSHAKE.unpack(handshake)
        # Constant time, so that the token cannot be guessed byte by byte.
        return int(rank) if hmac.compare_digest(token, self._token) else None


class TcpSender(ChannelSender):
    def __init__(self, connections: Sequence[socket.socket], seconds: float) -> None:
        """`connections`: of ranks 1 and up. `seconds`: time limit for sending a command to a rank."""
        super().__init__()
        self._connections = connections
        # Duplicates, because a timeout belongs to a socket object: sends block, but reading acknowledgements must not.
        self._ack_sockets = [connection.dup() for connection in connections]
        self._completed = [0] * len(connections)
        self._disconnected = [False] * len(connections)
        for connection in connections:
            _disable_nagle(connection)
            connection.settimeout(seconds)
        for ack_socket in self._ack_sockets:
            ack_socket.setblocking(False)

    def _send(self, header: bytes, message: bytes) -> None:
        frame = header + message
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.sendall(frame)
            except OSError as error:
                raise ChannelError(f"rank {rank} cannot be reached: {error}") from error

    def completed(self, rank: int) -> int:
        self._read_acks(rank - 1)
        return self._completed[rank - 1]

    def disconnected(self, rank: int) -> bool:
        self._read_acks(rank - 1)
        return self._disconnected[rank - 1]

    def close(self) -> None:
        for connection in (*self._connections, *self._ack_sockets):
            connection.close()

    def _read_acks(self, index: int) -> None:
        try:
            while acks := self._ack_sockets[index].recv(4096):
                self._completed[index] += len(acks)
            self._disconnected[index] = True
        except BlockingIOError:
            pass
        except OSError:
            self._disconnected[index] = True


class TcpReceiver(ChannelReceiver):
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        _disable_nagle(connection)
        connection.settimeout(SLICE_SECONDS)

    def fileno(self) -> int:
        return self._socket.fileno()

    def complete(self) -> None:
        try:
            self._socket.send(ACK)
        except OSError:
            # Rank 0 has disconnected, which the next `receive` reports.
            return

    def close(self) -> None:
        self._socket.close()

    def _read_bytes(self, size: int, seconds: float) -> bytearray:
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
                raise ChannelError(f"rank 0 has disconnected: {error}") from error
            if not count:
                raise ChannelError("rank 0 has disconnected")
            rest, silent = rest[count:], 0.0
        return out


def connect(endpoint: str, rank: int, seconds: float) -> TcpReceiver:
    """Connect a follower to rank 0. Raises ChannelError."""
    token, port, host = endpoint.split(" ", 2)
    try:
        connection = socket.create_connection((host, int(port)), seconds)
        connection.sendall(HANDSHAKE.pack(bytes.fromhex(token), rank))
    except OSError as error:
        raise ChannelError(f"rank 0 cannot be reached at {host}:{port}: {error}") from error
    return TcpReceiver(connection)


def _read_handshake(connection: socket.socket, pending: dict[socket.socket, bytes]) -> bytes | None:
    """Read from a pending connection. Returns None while bytes are missing; otherwise the handshake, which is
    incomplete if the peer has disconnected, and the connection is no longer pending."""
    handshake = pending.pop(connection)
    try:
        part = connection.recv(HANDSHAKE.size - len(handshake))
    except OSError:
        return handshake
    handshake += part
    if not part or len(handshake) == HANDSHAKE.size:
        return handshake
    pending[connection] = handshake
    return None


def _disable_nagle(connection: socket.socket) -> None:
    # Commands and acknowledgements are small and must not be delayed.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
