"""Asks the keepers of other machines for blocks. Every failure is a miss."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

import structlog
import zmq

from engine_worker.keeper.link import AnswerError, EndedError, Link, Store, Until
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
    """Not thread-safe but for `stop`: one thread at a time. No method raises: a keeper that fails has nothing."""

    def __init__(self, security: Security, clock: Callable[[], float] = time.monotonic) -> None:
        """`security`: the engine's. Keepers have the same keys as engines."""
        self.failed: Counter[str] = Counter(timeout=0, malformed=0, unusable=0)
        """Failures by reason. unusable: its address, our layout, or anything unexpected."""
        self._security = security.to("engine")
        self._clock = clock
        self._names = HostNames()
        self._stopped = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: OrderedDict[str, Link] = OrderedDict()
        self._paused: OrderedDict[str, float] = OrderedDict()
        """By address: until when a keeper is not asked."""
        self._log = LimitedLog(structlog.get_logger(), clock)

    def find(self, address: str, layout: Layout, digests: Sequence[bytes], end: float = inf) -> int:
        """How many leading blocks the keeper has, as far as it knows. Only the first MAX_FIND are looked for.
        `end`: the clock's time after which no answer is awaited any more."""
        hashes, until = list(digests[:MAX_FIND]), self._until(end)
        if not hashes or self._is_paused(address):
            return 0
        return self._ask(address, lambda link: link.find(form_of(layout), hashes, until), until) or 0

    def read(self, address: str, layout: Layout, digests: Sequence[bytes], store: Store, end: float = inf) -> int:
        """Read blocks in order, until one is not there or `store` refuses it; returns how many were stored.
        `end`: as in `find`.

        `store(index, total, data)` gets the parts of a block one after the other, which it must verify: `total` is the
        sum that they should have.
        """
        stored, until = 0, self._until(end)

        def count(index: int, total: int, data: memoryview) -> bool:
            nonlocal stored
            accepted = store(index, total, data)
            stored += accepted
            return accepted

        if digests and not self._is_paused(address):
            self._ask(address, lambda link: link.read(form_of(layout), digests, count, until), until)
        return stored

    def drop(self, address: str) -> bool:
        """Delete all blocks that the keeper has on disk, also if it has just failed. False: it did not confirm that."""
        return bool(self._ask(address, lambda link: link.drop(_never), _never))

    def stop(self) -> None:
        """Called in any thread: `find` and `read` return at once from now on, also those that are waiting."""
        self._stopped.set()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._context.term()

    def _until(self, end: float) -> Until:
        return lambda: self._stopped.is_set() or self._clock() >= end

    def _is_paused(self, address: str) -> bool:
        return self._clock() < self._paused.get(address, -inf)

    def _ask(self, address: str, ask: Callable[[Link], T], until: Until) -> T | None:
        """None if the keeper fails, or if `until` ends the waiting."""
        if until():
            return None
        try:
            return ask(self._link(address, until))
        except EndedError:
            self._close(address)
        except AnswerError as error:
            self._fail(address, error.reason, str(error))
        # Not an address, or not without keys; a block larger than an answer; no descriptor or no memory; or a defect:
        # whatever it is, the engine computes the blocks.
        except Exception as error:  # noqa: BLE001
            self._fail(address, "unusable", f"{type(error).__name__}: {error}")
        return None

    def _link(self, address: str, until: Until) -> Link:
        if address not in self._links:
            self._links[address] = Link(self._context, address, self._security, self._names, until)
            if len(self._links) > MAX_LINKS:
                self._links.popitem(last=False)[1].close()
        self._links.move_to_end(address)
        return self._links[address]

    def _fail(self, address: str, reason: str, text: str) -> None:
        self.failed[reason] += 1
        self._log.warning("keeper_failed", address=address, reason=reason, error=text)
        # The next connection has the present keys and the present address of the name.
        self._close(address)
        self._paused[address] = self._clock() + PAUSE_SECONDS
        self._paused.move_to_end(address)
        if len(self._paused) > MAX_PAUSED:
            self._paused.popitem(last=False)

    def _close(self, address: str) -> None:
        if (link := self._links.pop(address, None)) is not None:
            link.close()


def _never() -> bool:
    """The blocks must go, also while the engine ends."""
    return False
