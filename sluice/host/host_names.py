"""Resolves host names in separate threads.

ZeroMQ would resolve names in the one thread that serves all its connections, and all of them would stall while the DNS
does not answer.
"""

import re
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from sluice.host.address import is_ip, tcp_address

NAMED = re.compile(r"tcp://([0-9A-Za-z][0-9A-Za-z._-]*):([0-9]{1,5})")
AGAIN_SECONDS = 1.0
"""Minimum time between the starts of two lookups of the same name."""
FRESH_SECONDS = 60.0
"""An older result is used only if the DNS does not answer within PATIENCE_SECONDS."""
PATIENCE_SECONDS = 1.0
MAX_HOSTS = 1024
"""Bounds the memory for names, because names are received from peers, which could forge any number of them."""

Resolve = Callable[[str], tuple[str, ...]]


def resolve(host: str) -> tuple[str, ...]:
    """IP addresses, IPv4 first because services that listen at a name use IPv4. Raises OSError, UnicodeError."""
    ips = [str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return tuple(sorted(dict.fromkeys(ips), key=lambda ip: ":" in ip))


@dataclass
class _Host:
    ips: tuple[str, ...] = ()
    """Result of the latest successful lookup."""
    found_at: float = float("-inf")
    """Time of the latest successful lookup."""
    began_at: float = float("-inf")
    """Start of the latest lookup."""
    running: bool = False
    """Whether the latest lookup is in progress."""


class HostNames:
    """A cache of the IP addresses of host names. Thread-safe."""

    def __init__(self, resolve: Resolve = resolve, clock: Callable[[], float] = time.monotonic) -> None:
        self._resolve = resolve
        self._clock = clock
        self._lock = threading.Lock()
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    def ips(self, name: str) -> tuple[str, ...]:
        """The known addresses of a name. Starts a lookup if necessary, and never blocks.

        Empty during the first lookup of a name, or the first in FRESH_SECONDS, for at most PATIENCE_SECONDS. A name
        whose lookup fails keeps its former addresses.
        """
        now = self._clock()
        with self._lock:
            host = self._hosts.setdefault(name, _Host())
            self._hosts.move_to_end(name)
            if len(self._hosts) > MAX_HOSTS:
                self._hosts.popitem(last=False)
            if not host.running and now - host.began_at >= AGAIN_SECONDS:
                host.began_at, host.running = now, True
                threading.Thread(target=partial(self._look_up, name, host), name=f"name {name}", daemon=True).start()
            is_pending = host.running and now - host.began_at < PATIENCE_SECONDS
            return () if is_pending and now - host.found_at >= FRESH_SECONDS else host.ips

    def _look_up(self, name: str, host: _Host) -> None:
        ips: tuple[str, ...] = ()
        # A failed lookup is repeated at the next call. An invalid name raises UnicodeError.
        with suppress(OSError, UnicodeError):
            ips = self._resolve(name)
        with self._lock:
            host.running = False
            if ips:
                host.ips, host.found_at = ips, self._clock()


class Endpoint:
    """The endpoint that ZeroMQ connects to for an address, with an IP address instead of a name. Not thread-safe."""

    def __init__(self, address: str, names: HostNames) -> None:
        self._names = names
        match = NAMED.fullmatch(address)
        self._name, self._port = match.groups() if match and not is_ip(match[1]) else ("", "")
        self.text: str | None = None if self._name else address
        """The endpoint. None while the name's addresses are unknown."""
        self.follow()

    @property
    def named(self) -> bool:
        """Whether the address contains a host name."""
        return bool(self._name)

    def follow(self, *, try_next: bool = False) -> bool:
        """Look up the name. Returns whether `text` has changed.

        `try_next`: no service answers at `text`, so use the name's next address.
        """
        if not self._name:
            return False
        endpoints = [tcp_address(ip, self._port) for ip in self._names.ips(self._name)]
        former = self.text
        if former not in endpoints:
            self.text = endpoints[0] if endpoints else former
        elif try_next:
            self.text = endpoints[(endpoints.index(former) + 1) % len(endpoints)]
        return self.text != former
