"""Ports for the services of a ring."""

import contextlib
import random
import socket
from typing import Any

from sluice.launch import Ring
from sluice.launch.local_ring import RingError

LOWEST, HIGHEST = 10_000, 32_768
"""Linux gives those from 32,768 on to connections, and to whoever asks for any port."""


def free_ports(count: int) -> int:
    """The first of so many in a row. Until they are used nobody gets one of them by chance."""
    while True:
        first = random.SystemRandom().randrange(LOWEST, HIGHEST - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
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
