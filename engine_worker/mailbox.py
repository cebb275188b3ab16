"""The engine's hooks on the ring: messages sorted into requests and stops, responses sent to whom each belongs."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable

from structlog.stdlib import BoundLogger

from engine_worker.hooks import Responses, Stop
from engine_worker.intake import MAX_SEQUENCES
from engine_worker.outbox import Outbox
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.wire import Cancel, End, Open, Submit, Times, TokenRow

Stream = tuple[int, int]
"""Request and attempt."""


class Mailbox:
    """Every request handed to the core has a stream here until its last row. `dropped` counts messages without an
    answer, by reason."""

    def __init__(
        self,
        epoch: int,
        receive: Callable[[], Iterable[Submit | Cancel]],
        outbox: Outbox,
        log: BoundLogger,
    ) -> None:
        """`receive` gives what has come in, a bounded number at a time, and does not wait."""
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Requests, by error code."""
        self.draining = False
        """Take no new request."""
        self._epoch = epoch
        self._receive = receive
        self._outbox = outbox
        self._log = log
        self._messages: deque[Submit | Cancel] = deque()
        self._stops: list[Stop] = []
        self._streams: dict[Stream, Submit] = {}
        self._num_live: dict[Stream, int] = {}

    @property
    def waiting(self) -> bool:
        """Whether messages wait for the next step."""
        return bool(self._messages)

    def get_requests(self, limit: int) -> list[Submit]:
        """New requests, at most `limit`; those beyond it are refused.

        A request that needs the place or the number of one that is about to be stopped waits until that has happened.
        """
        if not self._messages:
            self._messages.extend(self._receive())
        found: list[Submit] = []
        while self._messages:
            message = self._messages[0]
            if isinstance(message, Submit) and self._awaits_stop(message, len(found) < limit):
                break
            self._messages.popleft()
            if message.engine_epoch != self._epoch:
                self._drop("other_epoch", message)
            elif isinstance(message, Cancel):
                self._stops.append(Stop(message.request, message.attempt, message.sequence))
            elif self._accept(message, len(found) < limit):
                found.append(message)
        return found

    def poll_stop_ids(self) -> list[Stop]:
        """What the routers cancelled."""
        stops, self._stops = self._stops, []
        return stops

    def send_responses(self, responses: Responses) -> None:
        """Hand everything to the outbox, and send what the lanes take."""
        for spec, fault in responses.refused:
            self._refuse(spec, fault)
        for spec, cached_tokens, queue in responses.opened:
            self._outbox.open(spec.detokenizer, _open(spec, cached_tokens, queue))
        by_address: defaultdict[str, list[TokenRow]] = defaultdict(list)
        for row in responses.rows:
            by_address[self._streams[row[:2]].detokenizer].append(row)
        for address, rows in by_address.items():
            self._outbox.put(address, rows)
        for row in responses.rows:
            if row.end is not None:
                self._end(row[:2], self._streams[row[:2]])
        self._outbox.flush()

    def _awaits_stop(self, spec: Submit, room: bool) -> bool:
        return bool(self._stops) and (not room or any(stop.request == spec.request for stop in self._stops))

    def _accept(self, spec: Submit, room: bool) -> bool:
        """Begin a stream if the core can have the request; else refuse or drop it."""
        stream = (spec.request, spec.attempt)
        if stream in self._streams:
            # The attempt that lives owns the stream: rows of a refusal would end it at the receiver.
            return self._drop("duplicate", spec)
        if not 1 <= spec.n <= MAX_SEQUENCES:
            return self._drop("invalid", spec)
        try:
            self._outbox.connect(spec.detokenizer)
        except ValueError:
            return self._drop("bad_address", spec)
        self._streams[stream] = spec
        self._num_live[stream] = spec.n
        fault = self._fault(room)
        if fault is not None:
            self._refuse(spec, fault)
        return fault is None

    def _fault(self, room: bool) -> Fault | None:
        if self.draining:
            return Fault(ErrorCode.DRAINING.name, "the engine is shutting down")
        return None if room else Fault(ErrorCode.OVERLOADED.name, "the engine holds as many requests as it may")

    def _refuse(self, spec: Submit, fault: Fault) -> None:
        """Answer with a stream that ends at once."""
        self.refused[fault.code] += 1
        self._log.info("refused", request_id=spec.name, code=fault.code, reason=fault.message)
        self._outbox.open(spec.detokenizer, _open(spec, 0, 0.0))
        end = End(FinishReason.ERROR, Times(0.0, 0.0, 0.0), fault=fault)
        rows = [TokenRow(spec.request, spec.attempt, index, 0, [], [], end) for index in range(spec.n)]
        self._outbox.put(spec.detokenizer, rows)
        for row in rows:
            self._end(row[:2], spec)

    def _end(self, stream: Stream, spec: Submit) -> None:
        """One of its sequences has ended."""
        self._num_live[stream] -= 1
        if not self._num_live[stream]:
            del self._streams[stream], self._num_live[stream]
            self._outbox.disconnect(spec.detokenizer)

    def _drop(self, reason: str, message: Submit | Cancel) -> bool:
        self.dropped[reason] += 1
        self._log.warning(
            "dropped", reason=reason, kind=type(message).__name__, request=message.request, attempt=message.attempt
        )
        return False


def _open(spec: Submit, cached_tokens: int, queue: float) -> Open:
    return Open(spec.request, spec.attempt, spec.n, spec.text, spec.router, len(spec.prompt), cached_tokens, queue)
