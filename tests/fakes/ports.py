"""Ports for the services of a ring."""

import contextlib
import socket
from typing import Any

from sluice.launch import Ring
from sluice.launch.local_ring import RingError


def free_ports(count: int) -> int:
    """The first of so many in a row."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for port in range(first + 1, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                return first


def start_with_metrics(engines: int, detokenizers: int, **options: Any) -> Ring:
    """A started ring. Its metrics ports were free when they were chosen; if one is taken by then, others are tried."""
    for attempt in range(5):
        port = free_ports(1 + engines + detokenizers)
        ring = Ring(engines=engines, detokenizers=detokenizers, metrics_port=port, **options)
        try:
            ring.start()
        except RingError:
            if attempt == 4:
                raise
        else:
            return ring
    raise AssertionError
