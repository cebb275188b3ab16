"""Names of hosts are looked up here, in threads of their own. ZeroMQ would do it in the one thread that serves all its
connections, and none of these would move while the DNS does not answer.
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

from sluice.ring.address import is_ip, tcp_address

NAMED = re.compile(r"tcp://([0-9A-Za-z][0-9A-Za-z._-]*):([0-9]{1,5})")
AGAIN_SECONDS = 1.0
"""From the beginning of a look-up until another one may begin."""
FRESH_SECONDS = 60.0
"""What is older than this counts only if the DNS does not answer within PATIENCE_SECONDS."""
PATIENCE_SECONDS = 1.0
# Names come off the wire: without a bound, forged ones would fill the memory.
MAX_HOSTS = 1024

Resolve = Callable[[str], tuple[str, ...]]


def resolve(host: str) -> tuple[str, ...]:
    """IP addresses, IPv4 first: a service that listens at a name does so by IPv4. Raises OSError, UnicodeError."""
    found = [str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return tuple(sorted(dict.fromkeys(found), key=lambda ip: ":" in ip))


@dataclass
class _Host:
    ips: tuple[str, ...] = ()
    """Of the latest look-up that succeeded."""
    found_at: float = float("-inf")
    began_at: float = float("-inf")
    """The latest look-up, as `running`."""
    running: bool = False


class HostNames:
    """What hosts' names stand for, as far as known. Thread-safe."""

    def __init__(self, resolve: Resolve = resolve, clock: Callable[[], float] = time.monotonic) -> None:
        self._resolve = resolve
        self._clock = clock
        self._lock = threading.Lock()
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    def ips(self, name: str) -> tuple[str, ...]:
        """Never blocks: what is known, and a look-up begins. None while a name is looked up for the first time, or for
        the first time in a while. A name that cannot be looked up keeps its former addresses."""
        now = self._clock()
        with self._lock:
            host = self._hosts.setdefault(name, _Host())
            self._hosts.move_to_end(name)
            if len(self._hosts) > MAX_HOSTS:
                self._hosts.popitem(last=False)
            if not host.running and now - host.began_at >= AGAIN_SECONDS:
                host.began_at, host.running = now, True
                threading.Thread(target=partial(self._look_up, name, host), name=f"name {name}", daemon=True).start()
            awaited = host.running and now - host.began_at < PATIENCE_SECONDS
            return () if awaited and now - host.found_at >= FRESH_SECONDS else host.ips

    def _look_up(self, name: str, host: _Host) -> None:
        ips: tuple[str, ...] = ()
        # What failed is tried again at the next call; an invalid name raises UnicodeError.
        with suppress(OSError, UnicodeError):
            ips = self._resolve(name)
        with self._lock:
            host.running = False
            if ips:
                host.ips, host.found_at = ips, self._clock()


class Endpoint:
    """The address that ZeroMQ connects to for a given one. Not thread-safe."""

    def __init__(self, address: str, names: HostNames) -> None:
        self._names = names
        match = NAMED.fullmatch(address)
        self._name, self._port = match.groups() if match and not is_ip(match[1]) else ("", "")
        self.text: str | None = None if self._name else address
        """None while the name's addresses are unknown."""
        self.follow()

    @property
    def named(self) -> bool:
        return bool(self._name)

    def follow(self, *, try_next: bool = False) -> bool:
        """Look the name up; returns whether `text` has changed. `try_next`: no service answers at `text`, so take the
        next of the name's addresses."""
        if not self._name:
            return False
        found = [tcp_address(ip, self._port) for ip in self._names.ips(self._name)]
        former = self.text
        if former not in found:
            self.text = found[0] if found else former
        elif try_next:
            self.text = found[(found.index(former) + 1) % len(found)]
        return self.text != former
