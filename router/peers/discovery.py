"""Addresses of peers: static ones, and sources that are looked up periodically, namely DNS names (such as a headless
Kubernetes Service) and files that list addresses."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable

import structlog
from structlog.stdlib import BoundLogger

from router.peers.address import FILE_PREFIX, Address, parse
from router.peers.address_file import AddressFile
from sluice.host.address import tcp_address

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]


class Addresses:
    """Resolves the configured addresses. Each address maps to its aliases: the addresses that the peer may report as
    its own.

    Raises AddressError for an invalid entry, and any exception of `check`.
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
        """Addresses that are known without a look-up."""
        known = [item.text for item in self._fixed if item.name is None or not item.name.one_peer_per_ip]
        return {text: frozenset({text}) for text in known}

    async def look_up(self) -> dict[str, frozenset[str]]:
        """All current addresses. A name that cannot be resolved or a file that cannot be read keeps its previous
        addresses."""
        listed = list(self._fixed)
        for file in self._files:
            # In a thread, because a network file system may block.
            listed += await asyncio.to_thread(file.read)
        aliases: dict[str, frozenset[str]] = {}
        for text, name in listed:
            if name is None:
                aliases[text] = frozenset({text})
                continue
            addresses = await self._look_up(name.host, name.port)
            if name.one_peer_per_ip:
                aliases |= {address: frozenset({address}) for address in addresses}
            else:
                aliases[text] = addresses | {text}
        return aliases

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
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(tcp_address(str(address[0]), port) for *_, address in infos)
