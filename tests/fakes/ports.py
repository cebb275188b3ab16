"""Ports for services whose clients must know them beforehand: neither another test nor the kernel takes them."""

import socket
from functools import cache
from pathlib import Path
from typing import Any

from sluice.launch import Ring

LOWEST, HIGHEST = 10_000, 65_535
ANY_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""What the kernel takes for connections, and for servers that ask for any port."""


def free_ports(count: int) -> int:
    """The first of so many in a row. This process keeps them until its end, other tests' processes get others."""
    least = int(ANY_PORTS.read_text().split()[0])
    end = least if least > LOWEST + 1000 else HIGHEST
    return next(first for first in range(LOWEST, end - count) if all(map(_reserve, range(first, first + count))))


def start_with_metrics(engines: int, detokenizers: int, **options: Any) -> Ring:
    """A started ring whose services have status pages."""
    port = free_ports(1 + engines + detokenizers)
    ring = Ring(engines=engines, detokenizers=detokenizers, metrics_port=port, **options)
    ring.start()
    return ring


@cache
def _reservations() -> list[socket.socket]:
    return []


def _reserve(port: int) -> bool:
    """Returns whether the port was free. A bound abstract socket reserves it until a service listens on it."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0sluice-test-port-{port}")
        socket.create_server(("", port)).close()
    except OSError:
        reservation.close()
        return False
    _reservations().append(reservation)
    return True
