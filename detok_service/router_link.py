"""What goes to one router: rows of the streams that have something to say, one message per drain of the inbox."""

from collections import Counter
from itertools import chain
from typing import Protocol

from detok_service.stream import Engine, Row, Stream
from sluice.ring.heartbeats import Epochs
from sluice.ring.message import Message
from sluice.ring.wire import Started, TextBatch

MAX_BATCH_TOKENS = 16_384
"""A message is closed when it holds so many."""
MAX_LOST_ENGINES = 4096
"""More than there are; only forged epochs are more."""


class Sender(Protocol):
    """What an outlet needs of a `sluice.ring.lane.Lane`."""

    def ready(self) -> bool:
        """Whether `send` would take a message now."""
        ...

    def send(self, message: Message) -> bool:
        """False: the lane is full."""
        ...

    def close(self, linger: float = 0.0) -> None:
        """Close, after at most `linger` seconds for what is still held."""
        ...


class RouterLink:
    """The sending end of one router's lane.

    While the lane is full each stream keeps its own text, joined, and the outlet only the list of them: memory is
    bounded by the live tokens, and no other router waits.
    """

    def __init__(self, lane: Sender, detokenizer: str, now: float, lost: Counter[int]) -> None:
        self.lost = lost
        """By engine epoch, the times that everything on its way to this router was given up: see `Outlets.remove`."""
        self.heard = now
        """When the router last gave a sign of life, or a stream first named it."""
        self.greeted = False
        """It said hello: it wants heartbeats."""
        self.warned_at: float | None = None
        """When its lane first took a heartbeat that says draining."""
        self._incarnations = Epochs()
        """Of the router."""
        self._lane = lane
        self._detokenizer = detokenizer
        self._started: list[Started] = []
        self._streams: list[Stream] = []
        self._unsent: TextBatch | None = None

    @property
    def waiting(self) -> int:
        """Rows not yet handed to the lane."""
        return len(self._started) + len(self._streams) + (len(self._unsent.request) if self._unsent else 0)

    def meet(self, epoch: int) -> bool:
        """Whether this is another incarnation of the router than those before."""
        former, self._incarnations = self._incarnations, self._incarnations.met(epoch)
        return former.replaced_by(epoch)

    def start(self, started: Started) -> None:
        """A request's streams begin."""
        self._started.append(started)

    def add(self, stream: Stream) -> None:
        """The stream has a row to send."""
        if not stream.listed:
            stream.listed = True
            self._streams.append(stream)

    def send(self, message: Message) -> bool:
        """A message that is worth nothing later, such as a heartbeat: sent now or not at all."""
        return self._lane.send(message)

    def lose(self, engine: Engine) -> None:
        """Something of this engine does not reach the router."""
        _, epoch = engine
        if epoch in self.lost or len(self.lost) < MAX_LOST_ENGINES:
            self.lost[epoch] += 1

    def forget(self, dropped: dict[int, int]) -> None:
        """The router wants nothing of these requests up to the attempt given. A message made already may still go."""

        def wanted(request: int, attempt: int) -> bool:
            return attempt > dropped.get(request, -1)

        self._started = [one for one in self._started if wanted(one.request, one.attempt)]
        self._streams = [stream for stream in self._streams if wanted(*stream.key[:2])]

    def flush(self) -> None:
        """Send as much as the lane takes."""
        while (self._streams or self._started or self._unsent) and self._lane.ready():
            batch = self._unsent or self._batch()
            self._unsent = None if self._lane.send(batch) else batch

    def close(self, linger: float = 0.0) -> None:
        """Close the lane."""
        self._lane.close(linger)

    def _batch(self) -> TextBatch:
        rows = []
        tokens = 0
        for stream in self._streams:
            if tokens >= MAX_BATCH_TOKENS:
                break
            stream.listed = False
            row = stream.row()
            tokens += len(row[2])
            rows.append(row)
        started, self._started = self._started, []
        self._streams = self._streams[len(rows) :]
        return _batch_of(self._detokenizer, started, rows)


def _batch_of(detokenizer: str, started: list[Started], rows: list[Row]) -> TextBatch:
    """`TextBatch.of`, for plain tuples."""
    if not rows:
        return TextBatch.of(detokenizer, started, [])
    keys, offset, tokens, logprobs, text, ends = zip(*rows, strict=True)
    request, attempt, sequence = zip(*keys, strict=True)
    return TextBatch(
        detokenizer,
        started,
        list(request),
        list(attempt),
        list(sequence),
        list(offset),
        list(map(len, tokens)),
        list(chain.from_iterable(tokens)),
        {i: found for i, found in enumerate(logprobs) if found},
        {i: end for i, end in enumerate(ends) if end is not None},
        list(text),
    )
