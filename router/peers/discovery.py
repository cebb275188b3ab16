"""Addresses of peers: a static list, and DNS names resolved periodically (such as a headless Kubernetes Service)."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]

DNS_PREFIXES = ("dns://", "dns:")


class AddressError(ValueError):
    """Invalid address of a peer."""


class Addresses:
    """The configured addresses, resolved. Each maps to its aliases: the addresses by which the peer may call itself.

    Raises AddressError for an invalid entry.
    """

    def __init__(self, entries: Iterable[str], resolve: Resolve | None = None) -> None:
        self._entries = [_parse(entry) for entry in entries]
        self._resolve = resolve or resolve_host
        self._last: dict[str, frozenset[str]] = {}

    @property
    def unresolved(self) -> dict[str, frozenset[str]]:
        """Addresses known without a DNS look-up."""
        return {entry: frozenset({entry}) for entry, name in self._entries if name is None or not name[0]}

    async def look_up(self) -> dict[str, frozenset[str]]:
        """All current addresses. A name that does not resolve keeps its former ones."""
        found: dict[str, frozenset[str]] = {}
        for entry, name in self._entries:
            if name is None:
                found[entry] = frozenset({entry})
                continue
            one_peer_per_ip, host, port = name
            addresses = await self._look_up(host, port)
            if one_peer_per_ip:
                found |= {address: frozenset({address}) for address in addresses}
            else:
                found[entry] = addresses | {entry}
        return found

    async def _look_up(self, host: str, port: int) -> frozenset[str]:
        key = f"{host}:{port}"
        try:
            self._last[key] = await self._resolve(host, port)
        except (OSError, UnicodeError):  # an invalid host name raises UnicodeError
            self._last.setdefault(key, frozenset())
        return self._last[key]


async def resolve_host(host: str, port: int) -> frozenset[str]:
    """A ZeroMQ address for each IP address of a host. Raises OSError if the look-up fails."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(_tcp(str(address[0]), port) for *_, address in found)


def _parse(entry: str) -> tuple[str, tuple[bool, str, int] | None]:
    """(entry, (one peer per IP address, host, port)); the latter is None if there is no name to resolve."""
    for prefix in DNS_PREFIXES:
        if entry.startswith(prefix):
            host, port = _host_and_port(entry, entry.removeprefix(prefix))
            return entry, (True, host, port)
    if entry.startswith("ipc://") and len(entry) > len("ipc://"):
        return entry, None
    if not entry.startswith("tcp://"):
        raise AddressError(f"{entry!r} is not an address: use tcp://host:port, ipc:///path or dns://name:port")
    host, port = _host_and_port(entry, entry.removeprefix("tcp://"))
    return entry, None if _is_ip(host) else (False, host, port)


def _host_and_port(entry: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise AddressError(f"{entry!r} needs a host and a port")
    return host.strip("[]"), int(port)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _tcp(ip: str, port: int) -> str:
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"
