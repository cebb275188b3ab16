"""Checks that TCP ports are free, before anything slow begins."""

import errno
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""A name such as localhost may resolve to addresses that this machine does not have."""

IN_USE = "is in use"


class PortError(OSError):
    """A port that cannot be listened on. The message names the port, the reason and the setting."""


@dataclass(frozen=True, slots=True)
class Port:
    setting: str
    """Such as "metrics_port"."""
    host: str
    number: int
    """0: any, which is always free."""
    owner: str = ""
    """Name of the service, if there are several."""


def check_ports(ports: Iterable[Port]) -> None:
    """Raises PortError, in one line, if some of them are in use or cannot be listened on."""
    problems = {port: problem for port in ports if port.number and (problem := _problem(port))}
    if problems:
        named = ", ".join(
            f"port {port.number} on {port.host}{f' ({port.owner})' if port.owner else ''} {why}"
            for port, why in problems.items()
        )
        flags = " and ".join(dict.fromkeys(f"--{port.setting.replace('_', '-')}" for port in problems))
        remedy = f": stop the process that has it, or choose another with {flags}"
        raise PortError(named + (remedy if IN_USE in problems.values() else ""))


def _problem(port: Port) -> str | None:
    try:
        found = socket.getaddrinfo(port.host, port.number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    refusals = [_refusal(family, address) for family, _, _, _, address in found]
    refused = [each for each in refusals if each is not None]
    decisive = [each for each in refused if each not in NOT_HERE]
    if not decisive and len(refused) < len(refusals):
        return None
    reason = (decisive or refused)[0]
    return IN_USE if reason == errno.EADDRINUSE else f"cannot be used: {os.strerror(reason)}"


def _refusal(family: int, address: tuple[object, ...]) -> int | None:
    """The errno; None if listening works."""
    try:
        # Without SO_REUSEPORT, so that it also fails if another server uses that option, as gRPC does.
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        return error.errno
    return None
