"""The socket of an HTTP port. The launcher opens it once for all its gateways, so that it outlives each of them."""

import socket
from collections.abc import Mapping

LISTENER_VARIABLE = "SLUICE_LISTENER"
"""Environment variable with the descriptor of the socket, which the launcher sets for its gateways."""


def bound(host: str, port: int) -> socket.socket:
    """A socket with this address that does not listen yet, so that connections are refused. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol, without which asyncio does not set TCP_NODELAY.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def inherited(environment: Mapping[str, str]) -> socket.socket | None:
    """The launcher's socket. None in a process that was not started by a launcher."""
    descriptor = environment.get(LISTENER_VARIABLE)
    return None if descriptor is None else socket.socket(fileno=int(descriptor))
