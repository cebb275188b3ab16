"""Asks the keepers of other machines for blocks. Every failure is a miss."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog
import zmq

from engine_worker.keeper.link import AnswerError, Link, Store
from engine_worker.keeper.messages import MAX_FIND, form_of
from engine_worker.pool_files.layout import Layout
from sluice.host.host_names import HostNames
from sluice.host.limited_log import LimitedLog
from sluice.lanes.keys import Security

MAX_LINKS = 8
"""Connections that are kept. The one that was used least recently is closed."""
PAUSE_SECONDS = 5.0
"""Time for which a keeper that has failed is not asked."""
MAX_PAUSED = 64
"""Bounds the memory for keepers that have failed, because addresses are received from peers."""

T = TypeVar("T")


class KeeperClient:
    """Not thread-safe: one thread at a time. No method raises: a keeper that fails has nothing."""

    def __init__(self, security: Security, clock: Callable[[], float] = time.monotonic) -> None:
        """`security`: the engine's. Keepers have the same keys as engines."""
        self.failed: Counter[str] = Counter()
        """Failures by reason: timeout, malformed or unusable (its address or our layout)."""
        self._security = security.to("engine")
        self._clock = clock
        self._names = HostNames()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: OrderedDict[str, Link] = OrderedDict()
        self._paused: OrderedDict[str, float] = OrderedDict()
        """By address: until when a keeper is not asked."""
        self._log = LimitedLog(structlog.get_logger(), clock)

    def find(self, address: str, layout: Layout, digests: Sequence[bytes]) -> int:
        """How many leading blocks the keeper has, as far as it knows. Only the first MAX_FIND are looked for."""
        hashes = list(digests[:MAX_FIND])
        return 0 if not hashes else self._ask(address, lambda link: link.find(form_of(layout), hashes)) or 0

    def read(self, address: str, layout: Layout, digests: Sequence[bytes], store: Store) -> int:
        """Read blocks in order, until one is not there or `store` refuses it; returns how many were stored.

        `store(index, total, data)` gets the parts of a block one after the other, which it must verify: `total` is the
        sum that they should have.
        """
        stored = 0

        def count(index: int, total: int, data: memoryview) -> bool:
            nonlocal stored
            accepted = store(index, total, data)
            stored += accepted
            return accepted

        if digests:
            self._ask(address, lambda link: link.read(form_of(layout), digests, count))
        return stored

    def drop(self, address: str) -> bool:
        """Delete all blocks that the keeper has on disk. False: it did not confirm that."""
        return bool(self._ask(address, Link.drop))

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._context.term()

    def _ask(self, address: str, ask: Callable[[Link], T]) -> T | None:
        """None if the keeper has failed, now or within PAUSE_SECONDS."""
        if self._clock() < self._paused.get(address, float("-inf")):
            return None
        try:
            return ask(self._link(address))
        except AnswerError as error:
            self._fail(address, error.reason, str(error))
        # Not an address, or not without keys; a block larger than an answer; no file descriptor is available.
        except (ValueError, zmq.ZMQError) as error:
            self._fail(address, "unusable", str(error))
        return None

    def _link(self, address: str) -> Link:
        if address not in self._links:
            self._links[address] = Link(self._context, address, self._security, self._names)
            if len(self._links) > MAX_LINKS:
                self._links.popitem(last=False)[1].close()
        self._links.move_to_end(address)
        return self._links[address]

    def _fail(self, address: str, reason: str, text: str) -> None:
        self.failed[reason] += 1
        self._log.warning("keeper_failed", address=address, reason=reason, error=text)
        # The next connection has the present keys and the present address of the name.
        if (link := self._links.pop(address, None)) is not None:
            link.close()
        self._paused[address] = self._clock() + PAUSE_SECONDS
        self._paused.move_to_end(address)
        if len(self._paused) > MAX_PAUSED:
            self._paused.popitem(last=False)
