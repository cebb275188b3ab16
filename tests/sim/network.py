"""A simulated network: lanes that lose, repeat, delay and reorder frames, between inboxes that open and close."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from random import Random

import msgspec
import structlog

from sluice.host.limited_log import LimitedLog
from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import HEADER, MAGIC
from sluice.wire.message import VERSION
from sluice.wire.requests import Submit
from sluice.wire.timing import RECONNECT_SECONDS

USUAL_SECONDS = 0.0005
"""Mean delay of a frame."""
NEXT_SECONDS = 1e-9
"""Minimum time between two frames of a lane."""
MAX_CONNECT_SECONDS = 0.1
"""How long a new lane may refuse messages."""


class SimInbox(Inbox):
    """An inbox without a socket, with the numbering and checks of the real one."""

    def __init__(self, network: "Network", address: str, messages) -> None:
        self.malformed = self.gaps = 0
        self._address = address
        self.arrived = asyncio.Event()
        self.on_arrival: Callable[[], None] = lambda: None
        self._expected = OrderedDict()
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._network = network
        self._max_bytes: dict[str, int] = {}
        self._log = LimitedLog(structlog.get_logger())
        self._frames: deque[tuple[SimLane, bytes]] = deque()
        network.bind(self)

    @property
    def address(self) -> str:
        return self._address

    @property
    def refused(self) -> int:
        return 0

    @property
    def waiting(self) -> bool:
        return bool(self._frames)

    def put(self, lane: "SimLane", frame: bytes) -> None:
        self._frames.append((lane, frame))
        self.arrived.set()
        self.on_arrival()

    def receive(self, limit: int = 256):
        received = []
        for _ in range(min(limit, len(self._frames))):
            lane, frame = self._frames.popleft()
            lane.unread -= 1
            self._accept(frame, received)
        if not self._frames:
            self.arrived.clear()
        return received

    def close(self) -> None:
        self._network.unbind(self)
        for lane, _ in self._frames:
            lane.unread -= 1
        self._frames.clear()


class SimLane:
    """The sending end of a lane."""

    open = True

    def __init__(self, network: "Network", address: str, capacity: int) -> None:
        self.address = address
        self.epoch = network.random.getrandbits(64)
        self.sent = 0
        self.unread = 0
        self.closed = False
        self.connected = False
        """Whether it was ever connected to a receiver."""
        self.free_at = 0.0
        """Arrival time of the latest frame. Later frames arrive after it, except reordered ones."""
        self._capacity = capacity
        self._network = network
        self._inbox: SimInbox | None = None
        """The receiver to which it is connected or connecting."""
        self._connected_at = 0.0
        self._ended_at: float | None = None
        """When `hung_up` first noticed that the connection has ended."""
        self._encoder = msgspec.msgpack.Encoder()

    def ready(self) -> bool:
        now, inbox = asyncio.get_running_loop().time(), self._network.inbox(self.address)
        if inbox is not self._inbox:
            self._inbox, self._connected_at = inbox, now + self._network.random.uniform(0.0, MAX_CONNECT_SECONDS)
        return inbox is not None and now >= self._connected_at and self.unread < self._capacity

    def send(self, message) -> bool:
        if not self.ready():
            return False
        frame = HEADER.pack(MAGIC, VERSION, self.epoch, self.sent) + self._encoder.encode(message)
        self.sent += 1
        self.unread += 1
        if isinstance(message, Submit):
            self._network.attempts += message.attempt > 0
            self._network.handovers += message.stopping.hands_over
        self._network.carry(self, frame)
        return True

    def hung_up(self) -> bool:
        listening = self._network.listens(self.address)
        self.connected = self.connected or listening
        ended = self.connected and not listening
        if not ended:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = asyncio.get_running_loop().time()
        return ended

    @property
    def refused_at(self) -> float | None:
        """Like the kernel, refuse connections to a process that has ended."""
        at = None if self._ended_at is None else self._ended_at + RECONNECT_SECONDS
        return at if at is not None and at <= asyncio.get_running_loop().time() else None

    def close(self, linger: float = 0.0) -> None:
        self.closed = True


class Disturbance:
    """Loses, repeats, delays or reorders some of the frames to an address, for a while."""

    def __init__(self, kind: str, address: str, until: float, probability: float) -> None:
        self.kind, self.address, self.until, self.probability = kind, address, until, probability
        self.harmed = 0
        """Number of frames affected."""


class Network:
    """Delivers frames. Frames in flight to an inbox that closes are lost."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.numbers = Random(random.random())
        """Source of epochs and request numbers."""
        self.disturbances: list[Disturbance] = []
        self.harmed = 0
        """Number of frames affected by disturbances."""
        self.attempts = 0
        """Number of submits sent for attempts after the first."""
        self.handovers = 0
        """Number of submits sent for attempts that hand over."""
        self.copied = 0
        """Blocks that engines copied from each other's files."""
        self._inboxes: dict[str, SimInbox] = {}

    def lane(self, _context, address: str, capacity: int = 64, security=None, watched=False, names=None) -> SimLane:
        return SimLane(self, address, capacity)

    def listens(self, address: str) -> bool:
        return address in self._inboxes

    def inbox(self, address: str) -> SimInbox | None:
        return self._inboxes.get(address)

    def bind(self, inbox: SimInbox) -> None:
        self._inboxes[inbox.address] = inbox

    def unbind(self, inbox: SimInbox) -> None:
        if self._inboxes.get(inbox.address) is inbox:
            del self._inboxes[inbox.address]

    def carry(self, lane: SimLane, frame: bytes) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        seconds, times = USUAL_SECONDS * (0.5 + self.random.random()), 1
        self.disturbances = [disturbance for disturbance in self.disturbances if disturbance.until > now]
        reordered = False
        for disturbance in self.disturbances:
            if disturbance.address in (lane.address, "*") and self.random.random() < disturbance.probability:
                self.harmed += 1
                disturbance.harmed += 1
                match disturbance.kind:
                    case "lose":
                        times = 0
                    case "repeat":
                        times = 2
                    case "delay":
                        seconds += self.random.uniform(0.1, 2.0)
                    case "reorder":
                        seconds, reordered = seconds + self.random.uniform(0.001, 0.1), True
        if not reordered:
            # Never at the same time as the previous frame: equal timers of the loop have no defined order.
            lane.free_at = max(lane.free_at + NEXT_SECONDS, now + seconds)
        at = now + seconds if reordered else lane.free_at
        if not times:
            lane.unread -= 1
        for _ in range(times):
            loop.call_at(at, self._arrive, lane, frame)
        lane.unread += max(0, times - 1)

    def _arrive(self, lane: SimLane, frame: bytes) -> None:
        inbox = self._inboxes.get(lane.address)
        if inbox is not None:
            inbox.put(lane, frame)
        else:
            lane.unread -= 1
