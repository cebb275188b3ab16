"""The engine's hooks on the ring: messages sorted into requests and stops, responses sent to whom each belongs."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable

from structlog.stdlib import BoundLogger

from engine_worker.hooks import Responses, Stop
from engine_worker.request import remaining
from engine_worker.ringside.outbox import Outbox
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.heartbeats import Hello
from sluice.ring.message import MAX_SEQUENCES
from sluice.ring.wire import Cancel, End, Open, Submit, Times, TokenRow


class Mailbox:
    """Every request handed to the core has a stream here until its last row: of its attempts one at a time.

    A next attempt ends the one before it, and begins when that has ended. `dropped` counts messages without an answer,
    by reason.
    """

    def __init__(
        self,
        epoch: int,
        receive: Callable[[], Iterable[Submit | Cancel | Hello]],
        outbox: Outbox,
        log: BoundLogger,
    ) -> None:
        """`receive` gives what has come in, a bounded number at a time, and does not wait: of hellos those of routers
        that took the place of another.
        """
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Requests, by error code."""
        self.draining = False
        """Take no new request."""
        self._epoch = epoch
        self._receive = receive
        self._outbox = outbox
        self._log = log
        self._messages: deque[Submit | Cancel | Hello] = deque()
        self._stops: list[Stop] = []
        self._streams: dict[int, Submit] = {}
        """By request."""
        self._num_live: dict[int, int] = {}
        self._orphans: set[tuple[int, int]] = set()

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
            message, room = self._messages[0], len(found) < limit
            if isinstance(message, Hello):
                self._orphans |= {(s.request, s.attempt) for s in self._streams.values() if s.router == message.address}
            elif message.engine_epoch != self._epoch:
                self._drop("other_epoch", message)
            elif isinstance(message, Cancel):
                self._stops.append(Stop(message.request, message.attempt, message.sequence))
            elif self._has_to_wait(message, room):
                break
            elif self._accept(message, room):
                found.append(message)
            self._messages.popleft()
        return found

    def poll_stop_ids(self) -> list[Stop]:
        """What the routers cancelled."""
        stops, self._stops = self._stops, []
        return stops

    def take_orphans(self) -> set[tuple[int, int]]:
        """(request, attempt) of those whose router was there before the one that is there now."""
        orphans, self._orphans = self._orphans, set()
        return orphans

    def send_responses(self, responses: Responses) -> None:
        """Hand everything to the outbox, and send what the lanes take."""
        for spec, fault in responses.refused:
            self._refuse(spec, fault)
        for spec, cached_tokens, queue in responses.opened:
            self._outbox.open(spec.detokenizer, _open(spec, cached_tokens, queue))
        by_address: defaultdict[str, list[TokenRow]] = defaultdict(list)
        for row in responses.rows:
            by_address[self._streams[row.request].detokenizer].append(row)
        for address, rows in by_address.items():
            self._outbox.put(address, rows)
        for row in responses.rows:
            if row.end is not None:
                self._end(self._streams[row.request])
        self._outbox.flush()

    def _has_to_wait(self, spec: Submit, room: bool) -> bool:
        """Until stops have been carried out; the attempt before it is stopped for it."""
        if self._stops and (not room or any(stop.request == spec.request for stop in self._stops)):
            return True
        former = self._streams.get(spec.request)
        if former is None or former.attempt >= spec.attempt:
            return False
        self._log.info("superseded", request_id=spec.name, attempt=former.attempt, by=spec.attempt)
        self._stops.append(Stop(former.request, former.attempt))
        return True

    def _accept(self, spec: Submit, room: bool) -> bool:
        """Begin a stream if the core can have the request; else refuse or drop it."""
        if spec.request in self._streams:
            return self._drop("stale", spec)
        if not (1 <= spec.n <= MAX_SEQUENCES and remaining(spec)):
            return self._drop("invalid", spec)
        try:
            self._outbox.connect(spec.detokenizer)
        except ValueError:
            return self._drop("bad_address", spec)
        self._streams[spec.request] = spec
        self._num_live[spec.request] = len(remaining(spec))
        fault = self._fault(spec, room)
        if fault is not None:
            self._refuse(spec, fault)
        return fault is None

    def _fault(self, spec: Submit, room: bool) -> Fault | None:
        if self.draining:
            return Fault(ErrorCode.DRAINING.name, "the engine is shutting down")
        if not self._outbox.reaches(spec.detokenizer):
            message = f"the engine has no file descriptor left for a lane to {spec.detokenizer}"
            return Fault(ErrorCode.OVERLOADED.name, message)
        return None if room else Fault(ErrorCode.OVERLOADED.name, "the engine holds as many requests as it may")

    def _refuse(self, spec: Submit, fault: Fault) -> None:
        """Answer with a stream that ends at once."""
        self.refused[fault.code] += 1
        self._log.info("refused", request_id=spec.name, code=fault.code, reason=fault.message)
        self._outbox.open(spec.detokenizer, _open(spec, 0, 0.0))
        end = End(FinishReason.ERROR, Times(0.0, 0.0, 0.0), fault=fault)
        offsets = {index: len(spec.resume.get(index, ())) for index in remaining(spec)}
        rows = [TokenRow(spec.request, spec.attempt, index, offset, [], [], end) for index, offset in offsets.items()]
        self._outbox.put(spec.detokenizer, rows)
        for _ in rows:
            self._end(spec)

    def _end(self, spec: Submit) -> None:
        """One of its sequences has ended."""
        self._num_live[spec.request] -= 1
        if not self._num_live[spec.request]:
            del self._streams[spec.request], self._num_live[spec.request]
            self._outbox.disconnect(spec.detokenizer)

    def _drop(self, reason: str, message: Submit | Cancel) -> bool:
        self.dropped[reason] += 1
        self._log.warning(
            "dropped", reason=reason, kind=type(message).__name__, request=message.request, attempt=message.attempt
        )
        return False


def _open(spec: Submit, cached_tokens: int, queue: float) -> Open:
    return Open(
        request=spec.request,
        attempt=spec.attempt,
        n=spec.n,
        text=spec.text,
        router=spec.router,
        prompt_tokens=len(spec.prompt),
        cached_tokens=cached_tokens,
        queue=queue,
        resume=spec.resume,
        ended=spec.ended,
    )
