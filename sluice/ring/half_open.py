"""How soon a connection ends whose other machine has vanished: that machine sends nothing, not even a refusal.

TCP's own means rather than ZeroMQ's heartbeats, which a stopped process does not answer: its connection would end as
well, and routers would take that for its death. Either way a connection ends whose receiver has taken nothing for 20 s
although all buffers are full.
"""

from typing import Any

import zmq

# An idle connection ends 25 s after the last sign of life: 10 s, then 3 probes in 5 s each.
KEEPALIVE = {
    zmq.SocketOption.TCP_KEEPALIVE: 1,
    zmq.SocketOption.TCP_KEEPALIVE_IDLE: 10,
    zmq.SocketOption.TCP_KEEPALIVE_INTVL: 5,
    zmq.SocketOption.TCP_KEEPALIVE_CNT: 3,
}
UNACKNOWLEDGED_MILLISECONDS = 20_000
"""For what was sent to arrive. Otherwise the kernel repeats it for a quarter of an hour."""
CONNECT_MILLISECONDS = 5_000
"""For an attempt to connect. Otherwise the kernel tries for two minutes."""


def end_half_open(socket: "zmq.Socket[Any]", *, sends: bool) -> None:
    """To be called before the socket is bound or connected. Has no effect on ipc connections."""
    for option, value in KEEPALIVE.items():
        socket.set(option, value)
    if sends:
        socket.set(zmq.TCP_MAXRT, UNACKNOWLEDGED_MILLISECONDS)
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
