"""TCP ports: checks that they are free before anything slow starts, and the socket of an HTTP port."""

import errno
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of addresses that this machine does not have, to which a name such as localhost may resolve."""

IN_USE = "is in use"
LISTENER_VARIABLE = "SLUICE_LISTENER"
"""Environment variable with the descriptor of the socket, which the launcher sets for its gateways."""


class PortError(OSError):
    """A port that cannot be listened on. The message names the port, the reason and the setting."""


@dataclass(frozen=True, slots=True)
class Port:
    setting: str
    """The setting that chooses the port, such as "metrics_port"."""
    host: str
    number: int
    """0: any free port."""
    owner: str = ""
    """Name of the service, if there are several."""


def check_ports(ports: Iterable[Port]) -> None:
    """Raises PortError, with a message of one line, if ports are in use or cannot be listened on."""
    problems = {port: problem for port in ports if port.number and (problem := _problem(port))}
    if problems:
        descriptions = ", ".join(
            f"port {port.number} on {port.host}{f' ({port.owner})' if port.owner else ''} {problem}"
            for port, problem in problems.items()
        )
        flags = " and ".join(dict.fromkeys(f"--{port.setting.replace('_', '-')}" for port in problems))
        remedy = f": stop the process that uses it, or choose another with {flags}"
        raise PortError(descriptions + (remedy if IN_USE in problems.values() else ""))


def _problem(port: Port) -> str | None:
    """Why the port cannot be used. None if it can."""
    try:
        addresses = socket.getaddrinfo(port.host, port.number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    results = [_listen_error(family, address) for family, _, _, _, address in addresses]
    errors = [result for result in results if result is not None]
    decisive = [error for error in errors if error not in NOT_HERE]
    if not decisive and len(errors) < len(results):
        return None
    number = (decisive or errors)[0]
    return IN_USE if number == errno.EADDRINUSE else f"cannot be used: {os.strerror(number)}"


def _listen_error(family: int, address: tuple[object, ...]) -> int | None:
    """The errno of an attempt to listen. None if it succeeds."""
    try:
        # Without SO_REUSEPORT, so that the attempt also fails if another server uses that option, as gRPC does.
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        return error.errno
    return None


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
