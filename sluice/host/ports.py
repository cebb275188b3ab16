"""Checks that TCP ports are free before anything slow starts."""

import errno
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of addresses that this machine does not have, to which a name such as localhost may resolve."""

IN_USE = "is in use"


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
