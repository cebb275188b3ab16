"""The forms in which the address of a peer may be written."""

import re
from typing import NamedTuple

from sluice.ring.address import is_ip

DNS_PREFIXES = ("dns://", "dns:")
FILE_PREFIX = "file://"
MAX_IPC_PATH = 107
"""Bytes of the path of a Unix socket."""
TCP_HOST = re.compile(r"[0-9A-Za-z:\[][0-9A-Za-z._:;%\[\]-]*")
"""What ZeroMQ takes for a host to connect to."""


class AddressError(ValueError):
    """Invalid address of a peer."""


class HostName(NamedTuple):
    """A name to resolve."""

    host: str
    port: int
    one_peer_per_ip: bool
    """Each of its IP addresses is a peer; otherwise they are addresses of one peer."""


class Address(NamedTuple):
    text: str
    name: HostName | None = None
    """None: there is nothing to resolve."""


def parse(text: str) -> Address:
    """Raises AddressError."""
    for prefix in DNS_PREFIXES:
        if text.startswith(prefix):
            host, port = _host_and_port(text, text.removeprefix(prefix))
            return Address(text, HostName(host.strip("[]"), port, True))
    if text.startswith("ipc://"):
        return Address(_ipc(text))
    if not text.startswith("tcp://"):
        raise AddressError(
            f"{text!r} is not an address: use tcp://host:port, ipc:///path, dns://name:port or file:///path"
        )
    host, port = _host_and_port(text, text.removeprefix("tcp://"))
    if not TCP_HOST.fullmatch(host):
        raise AddressError(f"{text!r} needs a host and a port: {host!r} is not a host")
    host = host.strip("[]")
    return Address(text, None if is_ip(host) else HostName(host, port, False))


def _ipc(text: str) -> str:
    path = text.removeprefix("ipc://")
    if not path.strip("@"):
        raise AddressError(f"{text!r} needs a path")
    if len(path.encode()) > MAX_IPC_PATH:
        raise AddressError(f"{text!r}: the path has {len(path.encode())} bytes, at most {MAX_IPC_PATH} are possible")
    return text


def _host_and_port(text: str, rest: str) -> tuple[str, int]:
    host, _, port = rest.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise AddressError(f"{text!r} needs a host and a port")
    return host, int(port)
