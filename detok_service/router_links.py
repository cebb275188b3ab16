"""Lanes to the routers. They carry heartbeats, and one text batch per router for each read of the inbox."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import msgspec
import structlog

from detok_service.stream import Engine, Row, TextStream
from sluice.host.limited_log import LimitedLog
from sluice.lanes.lane import WatchedLane, has_ended
from sluice.telemetry.measures import Histogram
from sluice.wire.heartbeats import DetokenizerHeartbeat, Epochs, Hello
from sluice.wire.prompt_logprobs import PromptLogprobs
from sluice.wire.rows import MAX_TEXT_ROWS, Started, TextBatch
from sluice.wire.timing import DRAIN_NOTICE_SECONDS

MAX_LINKS = 256
"""Links open at the same time; each has its own lane."""
MAX_UNGREETED = 64
"""Links to routers that have sent no hello, which only streams have named: the holder of an engine's key could name any
number of addresses."""
MAX_BATCH_TOKENS = 16_384
"""Keeps a batch far below lane.MAX_FRAME_BYTES, even with 20 logprobs per token."""
MAX_LOST_ENGINES = 4096
"""Engine epochs counted per link. More than any ring has, so only forged epochs can reach this limit."""
MAX_LOST = 256
"""Removed routers whose losses are remembered."""
DELAY_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Histogram buckets."""


class Delay:
    """Time from a row's arrival to its text being handed to a lane. All rows of a batch count as its oldest row."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = Histogram(DELAY_SECONDS)
        self._clock = clock

    def observe(self, arrived: float, rows: int) -> None:
        self.seconds.observe(max(0.0, self._clock() - arrived), rows)


class RouterLink:
    """The lane to one router, and everything that waits to be sent on it.

    While the lane is full, each stream accumulates its own text and the link keeps only a list of these streams. So
    memory is bounded by the live tokens, and a slow router does not delay the others.
    """

    def __init__(
        self, lane: WatchedLane, detokenizer: tuple[str, int], now: float, lost: Counter[int], delay: Delay
    ) -> None:
        """`detokenizer`: name and epoch of this detokenizer."""
        self.lost = lost
        """By engine epoch: how often everything queued for this router was dropped, see `RouterLinks.remove`."""
        self.last_hello = now
        """Time of the latest hello; before the first one, when a stream first named the router."""
        self.challenge = 0
        """See `Hello`; of the latest hello."""
        self.wants_heartbeats = False
        """Whether the router has sent a hello."""
        self.drain_sent_at: float | None = None
        """When the lane first accepted a heartbeat with `draining` set."""
        self.lane = lane
        self._epochs = Epochs()
        self._detokenizer = detokenizer
        self._started: list[Started] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._streams: list[TextStream] = []
        self._unsent: TextBatch | None = None
        self._delay = delay
        self._arrived: float | None = None
        """Arrival time of the oldest row that waits here; None if nothing waits."""

    @property
    def waiting(self) -> int:
        """Rows that the lane has not accepted yet."""
        built = len(self._unsent.request) + len(self._unsent.prompt_logprobs) if self._unsent else 0
        return len(self._started) + len(self._prompt_logprobs) + len(self._streams) + built

    def on_hello(self, hello: Hello, now: float) -> bool:
        """Record a hello. Returns whether a new router process has replaced the one that sent the previous hellos."""
        self.last_hello, self.wants_heartbeats = now, True
        former, self._epochs = self._epochs, self._epochs.after(hello.epoch)
        if not former.is_former(hello.epoch):
            self.challenge = hello.challenge
        return former.replaced_by(hello.epoch)

    def start(self, started: Started) -> None:
        self._started.append(started)

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        self._prompt_logprobs.append(logprobs)

    def add(self, stream: TextStream) -> None:
        if not stream.in_link:
            stream.in_link = True
            self._streams.append(stream)

    def count_lost(self, engine: Engine) -> None:
        """A row of this engine will not reach the router."""
        _, epoch = engine
        if epoch in self.lost or len(self.lost) < MAX_LOST_ENGINES:
            self.lost[epoch] += 1

    def drop(self, attempts: dict[int, int]) -> None:
        """Drop waiting rows of these requests, up to the given attempt. A batch that is already built may still be
        sent."""

        def wanted(request: int, attempt: int) -> bool:
            return attempt > attempts.get(request, -1)

        self._started = [start for start in self._started if wanted(start.request, start.attempt)]
        self._prompt_logprobs = [rows for rows in self._prompt_logprobs if wanted(rows.request, rows.attempt)]
        self._streams = [stream for stream in self._streams if wanted(*stream.key[:2])]

    def flush(self, arrived: float) -> None:
        """Send what the lane accepts. `arrived`: arrival time of the rows added since the last flush."""
        if not self.waiting:
            # Waiting rows may have been dropped.
            self._arrived = None
            return
        since = self._arrived = arrived if self._arrived is None else self._arrived
        while self.waiting and self.lane.ready():
            # A built batch cannot be returned to its streams, so keep it if the lane does not accept it after all.
            batch = self._unsent or self._batch()
            self._unsent = None if self.lane.send(batch) else batch
            if self._unsent is None:
                self._delay.observe(since, len(batch.request))
        if not self.waiting:
            self._arrived = None

    def _batch(self) -> TextBatch:
        rows: list[Row] = []
        accepted: dict[int, int] = {}
        scored, tokens = 0, 0
        for prompt in self._prompt_logprobs:
            if tokens >= MAX_BATCH_TOKENS:
                break
            scored, tokens = scored + 1, tokens + prompt.rows
        # A stream's Started must not be sent after its rows, nor a prompt's log-probabilities after its tokens.
        started, self._started = self._started[:MAX_TEXT_ROWS], self._started[MAX_TEXT_ROWS:]
        first = not self._started and scored == len(self._prompt_logprobs)
        for stream in self._streams[:MAX_TEXT_ROWS] if first else ():
            if tokens >= MAX_BATCH_TOKENS:
                break
            stream.in_link = False
            row = stream.row()
            if stream.accepted:
                # A stop string may have cut off some of the accepted tokens.
                accepted[len(rows)], stream.accepted = min(stream.accepted, len(row[2])), 0
            tokens += len(row[2])
            rows.append(row)
        self._streams = self._streams[len(rows) :]
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs[:scored], self._prompt_logprobs[scored:]
        return _batch_of(self._detokenizer, started, rows, accepted, prompt_logprobs)


class RouterLinks:
    """Links by router address. A link is opened when its router is first named, and closed when it falls silent."""

    def __init__(
        self,
        open_lane: Callable[[str], WatchedLane],
        detokenizer: tuple[str, int],
        log: structlog.stdlib.BoundLogger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_lane` raises ValueError for an invalid address. `detokenizer`: name and epoch of this detokenizer."""
        self.delay = Delay(clock)
        self.by_address: dict[str, RouterLink] = {}
        """Only this class changes it."""
        self._lost: OrderedDict[str, Counter[int]] = OrderedDict()
        """By address: `RouterLink.lost` of the latest MAX_LOST routers that were removed."""
        self._open_lane = open_lane
        self._detokenizer = detokenizer
        self._log = LimitedLog(log, clock)

    @property
    def waiting(self) -> int:
        """Rows waiting for full lanes."""
        # Iterate over a copy: scrapes call this from another thread.
        return sum(link.waiting for link in list(self.by_address.values()))

    def link_to(self, address: str, now: float, *, greeted: bool = False) -> RouterLink | None:
        """The link to a router, opened if needed. If the address is invalid or there are too many links, logs a warning
        and returns None: rows for this router are lost. `greeted`: the router has sent a hello."""
        link = self.by_address.get(address)
        if link is None:
            try:
                if len(self.by_address) >= MAX_LINKS:
                    raise ValueError(f"there are already lanes to {MAX_LINKS} routers, the limit")
                ungreeted = sum(not link.wants_heartbeats for link in self.by_address.values())
                if not greeted and ungreeted >= MAX_UNGREETED:
                    raise ValueError(f"there are already lanes to {ungreeted} routers that sent no hello, the limit")
                lane = self._open_lane(address)
            except ValueError as error:
                self._log.warning("bad_address", address=address, error=str(error))
                return None
            # Losses must still be reported to a router that was removed and has returned.
            lost = self._lost.pop(address, Counter())
            link = self.by_address[address] = RouterLink(lane, self._detokenizer, now, lost, self.delay)
        return link

    def listening(self) -> Iterator[tuple[str, RouterLink]]:
        """Links to the routers that have sent a hello, with their addresses."""
        return ((address, link) for address, link in self.by_address.items() if link.wants_heartbeats)

    def heartbeat(self, heartbeat: DetokenizerHeartbeat, now: float) -> None:
        """Send it to all listening routers, adding to each copy the losses on that router's link."""
        for _, link in self.listening():
            missed = dict(link.lost + Counter(heartbeat.missed))
            addressed = msgspec.structs.replace(heartbeat, missed=missed, challenge=link.challenge)
            # Never queued: a heartbeat that has waited for a full lane would be out of date.
            if link.lane.send(addressed) and heartbeat.draining and link.drain_sent_at is None:
                link.drain_sent_at = now

    def drain_noticed(self, now: float) -> bool:
        """Whether all listening routers were notified of the drain long enough ago that no request placed earlier is
        still on its way."""
        return all(
            link.drain_sent_at is not None and now - link.drain_sent_at >= DRAIN_NOTICE_SECONDS
            for _, link in self.listening()
        )

    def drop(self, attempts: dict[int, int]) -> None:
        for link in self.by_address.values():
            link.drop(attempts)

    def flush(self, arrived: float) -> None:
        """See `RouterLink.flush`."""
        for link in self.by_address.values():
            link.flush(arrived)

    def exclude_pause(self, seconds: float, now: float) -> None:
        """Do not count a pause of this process, up to now, as silence of the routers."""
        for link in self.by_address.values():
            link.last_hello = min(now, link.last_hello + seconds)

    def silent(self, seconds: float, now: float) -> list[str]:
        """Addresses of routers that have sent no hello for `seconds`."""
        return [address for address, link in self.by_address.items() if now - link.last_hello > seconds]

    def ended(self) -> list[str]:
        """Addresses of routers whose processes have ended. Must be called regularly, see `has_ended`."""
        return [address for address, link in self.by_address.items() if has_ended(link.lane)]

    def remove(self, address: str, engines: Iterable[int]) -> int:
        """Close the lane to a router. Returns the number of waiting rows that are lost.

        If the router turns out to be alive, heartbeats to it will report a loss for each of these engine epochs.
        """
        link = self.by_address.pop(address)
        link.lane.close()
        self._lost[address] = link.lost + Counter(engines)
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        return link.waiting

    def close(self, linger: float) -> None:
        """Close all lanes, giving each at most `linger` seconds to send what it holds."""
        for link in self.by_address.values():
            link.lane.close(linger)


def _batch_of(
    detokenizer: tuple[str, int],
    started: list[Started],
    rows: list[Row],
    accepted: dict[int, int],
    prompt_logprobs: list[PromptLogprobs],
) -> TextBatch:
    name, epoch = detokenizer
    if not rows:
        return TextBatch(
            name, started, [], [], [], [], [], [], {}, {}, [], prompt_logprobs=prompt_logprobs, epoch=epoch
        )
    keys, offset, tokens, logprobs, text, ends = zip(*rows, strict=True)
    request, attempt, sequence = zip(*keys, strict=True)
    return TextBatch(
        name,
        started,
        list(request),
        list(attempt),
        list(sequence),
        list(offset),
        list(map(len, tokens)),
        list(chain.from_iterable(tokens)),
        {i: row_logprobs for i, row_logprobs in enumerate(logprobs) if row_logprobs},
        {i: end for i, end in enumerate(ends) if end is not None},
        list(text),
        accepted,
        prompt_logprobs,
        epoch,
    )
