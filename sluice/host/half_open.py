"""Timeouts for connections to a machine that has vanished, which sends nothing, not even a refusal.

These are TCP's mechanisms instead of ZeroMQ's heartbeats, because a suspended process does not answer ZeroMQ's: its
connection would end too, and routers would consider the process dead. In either case, a connection ends if its receiver
has read nothing for 20 s although all buffers are full.
"""

from typing import Any

import zmq

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


def end_half_open(socket: "zmq.Socket[Any]", *, sends: bool) -> None:
    """Set the timeouts. Call before the socket is bound or connected. Has no effect on ipc connections."""
    for option, value in KEEPALIVE.items():
        socket.set(option, value)
    if sends:
        socket.set(zmq.TCP_MAXRT, UNACKNOWLEDGED_MILLISECONDS)
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
