"""Sends rows of tensors to the routers on separate lanes, so that text never waits for them. No call blocks."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from structlog.stdlib import BoundLogger

from sluice.lanes.lane import SendLane
from sluice.wire.heartbeats import KeepAlive
from sluice.wire.message import MAX_SEQUENCES
from sluice.wire.tensors import PART_BYTES, TensorBatch, TensorRows
from sluice.wire.timing import KEEP_ALIVE_SECONDS, LANE_FORGET_SECONDS

LANE_CAPACITY = 4
"""Messages that ZeroMQ queues per lane. Few, since `TensorOutbox.room` does not count them."""
MAX_LANES = 256
PARTS_PER_MESSAGE = 16 * MAX_SEQUENCES


@dataclass(slots=True)
class _Router:
    lane: SendLane
    used_at: float
    """When the last request ended, or the lane last accepted a message."""
    users: int = 0
    """Number of live requests with tensors."""
    waiting: deque[TensorRows] = field(default_factory=deque)
    nbytes: int = 0
    """Bytes of the waiting rows."""


class TensorOutbox:
    """Queues rows until the lane to their router accepts them. `room` limits how many more may be computed."""

    def __init__(
        self,
        engine: str,
        epoch: int,
        open_lane: Callable[[str], SendLane],
        clock: Callable[[], float],
        log: BoundLogger,
        buffer: int,
    ) -> None:
        """`open_lane` raises ValueError on an invalid address. `clock`: seconds. `buffer`: bytes per router."""
        self.lost = 0
        """Bytes dropped since the start."""
        self._engine = engine
        self._epoch = epoch
        self._open_lane = open_lane
        self._clock = clock
        self._log = log
        self._buffer = buffer
        self._routers: dict[str, _Router] = {}
        self._kept_alive_at = clock()

    @property
    def waiting(self) -> int:
        """Bytes of all waiting rows."""
        return sum(router.nbytes for router in self._routers.values())

    def flowing(self, seconds: float) -> bool:
        """Whether rows wait for a lane that has accepted a message, or whose last request has ended, within this
        time."""
        now = self._clock()
        return any(router.waiting and now - router.used_at < seconds for router in self._routers.values())

    def room(self, address: str) -> int:
        """Bytes that may be put for this router, to which a request must be connected."""
        return max(0, self._buffer - self._routers[address].nbytes)

    def connect(self, address: str) -> None:
        """Call when a request with tensors begins. Raises ValueError if the address is invalid or all lanes are in
        use."""
        router = self._routers.get(address)
        if router is None:
            if len(self._routers) >= MAX_LANES:
                raise ValueError(f"all {MAX_LANES} lanes are in use")
            router = self._routers[address] = _Router(self._open_lane(address), self._clock())
        router.users += 1

    def disconnect(self, address: str) -> None:
        """Call when all rows of a request were put."""
        router = self._routers[address]
        router.users -= 1
        router.used_at = self._clock()

    def put(self, address: str, rows: TensorRows) -> None:
        router = self._routers[address]
        router.waiting.extend(rows.parts())
        router.nbytes += len(rows.data)

    def flush(self) -> None:
        for router in self._routers.values():
            while router.waiting and router.lane.ready() and self._send(router):
                pass

    def tick(self) -> None:
        """Call at least every second: sends keep-alives, drops rows for dead lanes, closes unused lanes."""
        now = self._clock()
        if now - self._kept_alive_at < KEEP_ALIVE_SECONDS:
            return
        self._kept_alive_at = now
        for address, router in list(self._routers.items()):
            # If the last rows were lost, the receiver sees it as a gap before the keep-alive's frame number.
            if router.lane.ready():
                router.lane.send(KeepAlive(self._engine, self._epoch))
            if now - router.used_at < LANE_FORGET_SECONDS:
                continue
            if router.waiting and not router.lane.ready():
                self._drop(address, router)
            if not (router.users or router.waiting):
                self._routers.pop(address).lane.close()

    def close(self, linger: float = 0.0) -> None:
        """Drop waiting rows and close all lanes; each may take `linger` seconds to transmit what it has accepted."""
        for address, router in self._routers.items():
            self._drop(address, router)
            router.lane.close(linger)
        self._routers.clear()

    def _send(self, router: _Router) -> bool:
        """Send the oldest rows, up to PART_BYTES. False if the lane is full in spite of `ready`."""
        parts: list[TensorRows] = []
        size = 0
        for part in router.waiting:
            if parts and (size + len(part.data) > PART_BYTES or len(parts) >= PARTS_PER_MESSAGE):
                break
            parts.append(part)
            size += len(part.data)
        if not router.lane.send(TensorBatch(self._engine, self._epoch, parts)):
            return False
        for _ in parts:
            router.waiting.popleft()
        router.nbytes -= size
        router.used_at = self._clock()
        return True

    def _drop(self, address: str, router: _Router) -> None:
        if router.waiting:
            self.lost += router.nbytes
            self._log.error("tensors_lost", router=address, bytes=router.nbytes)
            router.waiting.clear()
            router.nbytes = 0
