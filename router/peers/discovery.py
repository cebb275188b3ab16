"""Addresses of peers: a static list, and what is looked up periodically: DNS names (such as a headless Kubernetes
Service) and files that list addresses."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable

import structlog
from structlog.stdlib import BoundLogger

from router.peers.address import FILE_PREFIX, Address, parse
from router.peers.address_file import AddressFile
from sluice.ring.address import tcp_address

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]


class Addresses:
    """The configured addresses, resolved. Each maps to its aliases: the addresses by which the peer may call itself.

    Raises AddressError for an invalid entry, and what `check` raises.
    """

    def __init__(
        self,
        entries: Iterable[str],
        resolve: Resolve | None = None,
        check: Callable[[str], None] = lambda _: None,
        log: BoundLogger | None = None,
    ) -> None:
        """`check` raises ValueError for an address that must not be used."""
        log = log or structlog.get_logger()
        self._fixed: list[Address] = []
        self._files: list[AddressFile] = []
        for entry in entries:
            if entry.startswith(FILE_PREFIX):
                self._files.append(AddressFile(entry, check, log))
            else:
                check(entry)
                self._fixed.append(parse(entry))
        self._resolve = resolve or resolve_host
        self._last: dict[str, frozenset[str]] = {}

    @property
    def unresolved(self) -> dict[str, frozenset[str]]:
        """Addresses known without a look-up."""
        known = [each.text for each in self._fixed if each.name is None or not each.name.one_peer_per_ip]
        return {text: frozenset({text}) for text in known}

    async def look_up(self) -> dict[str, frozenset[str]]:
        """All current addresses. A name that does not resolve, or a file that cannot be read, keeps its former ones."""
        listed = list(self._fixed)
        for file in self._files:
            # In a thread, since a network file system may block.
            listed += await asyncio.to_thread(file.read)
        found: dict[str, frozenset[str]] = {}
        for text, name in listed:
            if name is None:
                found[text] = frozenset({text})
                continue
            addresses = await self._look_up(name.host, name.port)
            if name.one_peer_per_ip:
                found |= {address: frozenset({address}) for address in addresses}
            else:
                found[text] = addresses | {text}
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
    return frozenset(tcp_address(str(address[0]), port) for *_, address in found)
