"""Where peers are: a static list of addresses, and DNS names that are resolved again and again (a headless Service)."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]

DNS_PREFIXES = ("dns://", "dns:")


class AddressError(ValueError):
    """A peer's address cannot be read."""


class Addresses:
    """What the settings list, resolved. An address maps to its aliases: how a peer that answers there may name itself.

    Raises AddressError for an entry that is no address.
    """

    def __init__(self, entries: Iterable[str], resolve: Resolve | None = None) -> None:
        self._entries = [_parse(entry) for entry in entries]
        self._resolve = resolve or resolve_host
        self._last: dict[str, frozenset[str]] = {}

    @property
    def unresolved(self) -> dict[str, frozenset[str]]:
        """What is known without a look-up."""
        return {entry: frozenset({entry}) for entry, name in self._entries if name is None or not name[0]}

    async def look_up(self) -> dict[str, frozenset[str]]:
        """All addresses now. A name that cannot be resolved keeps what it had."""
        found: dict[str, frozenset[str]] = {}
        for entry, name in self._entries:
            if name is None:
                found[entry] = frozenset({entry})
                continue
            spread, host, port = name
            addresses = await self._look_up(host, port)
            if spread:
                found |= {address: frozenset({address}) for address in addresses}
            else:
                found[entry] = addresses | {entry}
        return found

    async def _look_up(self, host: str, port: int) -> frozenset[str]:
        key = f"{host}:{port}"
        try:
            self._last[key] = await self._resolve(host, port)
        except (OSError, UnicodeError):  # a name that cannot be one raises UnicodeError
            self._last.setdefault(key, frozenset())
        return self._last[key]


async def resolve_host(host: str, port: int) -> frozenset[str]:
    """ZeroMQ addresses of all of a name's IP addresses. Raises OSError where the look-up fails."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(_tcp(str(address[0]), port) for *_, address in found)


def _parse(entry: str) -> tuple[str, tuple[bool, str, int] | None]:
    """The entry, and (one peer per IP address, host, port) where there is a name to look up."""
    for prefix in DNS_PREFIXES:
        if entry.startswith(prefix):
            host, port = _host_and_port(entry, entry.removeprefix(prefix))
            return entry, (True, host, port)
    if entry.startswith("ipc://") and len(entry) > len("ipc://"):
        return entry, None
    if not entry.startswith("tcp://"):
        raise AddressError(f"{entry!r} is no address: write tcp://host:port, ipc:///path or dns://name:port")
    host, port = _host_and_port(entry, entry.removeprefix("tcp://"))
    return entry, None if _is_ip(host) else (False, host, port)


def _host_and_port(entry: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise AddressError(f"{entry!r} has no host and port")
    return host.strip("[]"), int(port)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _tcp(ip: str, port: int) -> str:
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"
