"""Addresses of peers: static ones, and sources that are looked up periodically, namely DNS names (such as a headless
Kubernetes Service) and files that list addresses."""

import asyncio
import re
import socket
import stat
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import structlog
from structlog.stdlib import BoundLogger

from sluice.host.address import is_ip, tcp_address

DNS_PREFIXES = ("dns://", "dns:")
FILE_PREFIX = "file://"
MAX_IPC_PATH = 107
"""Maximum length in bytes of a Unix socket's path."""
TCP_HOST = re.compile(r"[0-9A-Za-z:\[][0-9A-Za-z._:;%\[\]-]*")
"""Hosts that ZeroMQ accepts in the address to connect to."""
MAX_FILE_BYTES = 1 << 20
MAX_ADDRESSES = 4096
Resolve = Callable[[str, int], Awaitable[frozenset[str]]]


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


def parse_address(text: str) -> Address:
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


class AddressFile:
    """A file with one address per line; `#` starts a comment. To change the file, rename a new one onto it.

    Raises AddressError if `entry` is not an absolute path.
    """

    def __init__(self, entry: str, check: Callable[[str], None], log: BoundLogger) -> None:
        """`check` raises ValueError for an address that must not be used."""
        self.path = Path(entry.removeprefix(FILE_PREFIX))
        if not self.path.is_absolute() or self.path == Path("/"):
            raise AddressError(f"{entry!r} needs an absolute path: file:///path")
        self._check = check
        self._log = log
        self._last: tuple[Address, ...] = ()
        self._failure = ""

    def read(self) -> tuple[Address, ...]:
        """The addresses in the file. If it cannot be read or has an invalid line, the previous ones. May block."""
        try:
            self._last = self._parse(self._text())
        except (OSError, ValueError) as error:
            # Log each reason once, since the file is read every few seconds.
            if str(error) != self._failure:
                self._failure = str(error)
                details = {"error": self._failure, "kept": len(self._last)}
                self._log.warning("address_file_failed", file=str(self.path), **details)
        else:
            self._failure = ""
        return self._last

    def _text(self) -> str:
        # Reject pipes, whose reader would block forever.
        status = self.path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise AddressError(f"not a regular file of at most {MAX_FILE_BYTES} bytes")
        return self.path.read_text(encoding="utf-8")

    def _parse(self, text: str) -> tuple[Address, ...]:
        addresses: dict[str, Address] = {}
        for number, line in enumerate(text.splitlines(), 1):
            entry = line.partition("#")[0].strip()
            if not entry:
                continue
            try:
                addresses[entry] = parse_address(entry)
                self._check(entry)
            except ValueError as error:
                raise AddressError(f"line {number}: {error}") from None
        if len(addresses) > MAX_ADDRESSES:
            raise AddressError(f"{len(addresses)} addresses, at most {MAX_ADDRESSES} are allowed")
        return tuple(addresses.values())


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
                self._fixed.append(parse_address(entry))
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
