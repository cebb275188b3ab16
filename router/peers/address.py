"""Parses the addresses of peers."""

import re
from typing import NamedTuple

from sluice.host.address import is_ip

DNS_PREFIXES = ("dns://", "dns:")
FILE_PREFIX = "file://"
MAX_IPC_PATH = 107
"""Maximum length in bytes of a Unix socket's path."""
TCP_HOST = re.compile(r"[0-9A-Za-z:\[][0-9A-Za-z._:;%\[\]-]*")
"""Hosts that ZeroMQ accepts in the address to connect to."""


class AddressError(ValueError):
    """Invalid address of a peer."""


class HostName(NamedTuple):
    """A name to resolve."""

    host: str
    port: int
    one_peer_per_ip: bool
    """Whether each IP address of the name is a separate peer; otherwise all of them belong to one peer."""


class Address(NamedTuple):
    text: str
    name: HostName | None = None
    """The name to resolve, if any."""


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
        raise AddressError(f"{text!r} needs a host and a port: {host!r} is not a valid host")
    host = host.strip("[]")
    return Address(text, None if is_ip(host) else HostName(host, port, False))


def _ipc(text: str) -> str:
    path = text.removeprefix("ipc://")
    if not path.strip("@"):
        raise AddressError(f"{text!r} needs a path")
    if len(path.encode()) > MAX_IPC_PATH:
        raise AddressError(f"{text!r}: the path has {len(path.encode())} bytes, at most {MAX_IPC_PATH} are allowed")
    return text


def _host_and_port(text: str, rest: str) -> tuple[str, int]:
    host, _, port = rest.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise AddressError(f"{text!r} needs a host and a port")
    return host, int(port)
