"""Fixed ports, for services whose clients must know the port in advance.

Neither the tests of another process nor the kernel's choice of ephemeral ports can collide with them.
"""

import socket
from functools import cache
from pathlib import Path

LOWEST, HIGHEST = 10_000, 65_535
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The range from which the kernel chooses ports of connections, and of servers that listen on port 0."""


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports, which stay reserved for this process until it ends."""
    first_ephemeral = int(EPHEMERAL_PORTS.read_text().split()[0])
    end = first_ephemeral if first_ephemeral > LOWEST + 1000 else HIGHEST
    return next(first for first in range(LOWEST, end - count) if all(map(_reserve, range(first, first + count))))


@cache
def _reservations() -> list[socket.socket]:
    return []


def _reserve(port: int) -> bool:
    """Returns whether the port was free. A bound abstract Unix socket marks it as reserved for other tests."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0sluice-test-port-{port}")
        socket.create_server(("", port)).close()
    except OSError:
        reservation.close()
        return False
    _reservations().append(reservation)
    return True
