"""The core's hooks, implemented on the ring: sorts messages into requests and stops, and sends responses to their
detokenizers and routers. Also ends the requests whose router is gone."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from structlog.stdlib import BoundLogger

from engine_worker.core.engine import Engine
from engine_worker.hooks import Responses, Stop
from engine_worker.ringside.heartbeats import RouterTable
from engine_worker.ringside.outbox import Outbox
from engine_worker.ringside.tensor_outbox import TensorOutbox
from sluice.wire.errors import ErrorCode, Fault, FinishReason
from sluice.wire.heartbeats import Hello
from sluice.wire.message import MAX_SEQUENCES
from sluice.wire.requests import Cancel, Submit
from sluice.wire.rows import End, Times, TokenRow

CHECK_SECONDS = 1.0
"""Interval between searches for silent routers."""


class Mailbox:
    """Keeps the `Submit` of each request in the core until the request's last row.

    The core has at most one attempt of a request: a later attempt stops the current one, and begins when that has
    ended.
    """

    def __init__(
        self,
        epoch: int,
        receive: Callable[[], Iterable[Submit | Cancel | Hello]],
        outbox: Outbox,
        tensors: TensorOutbox,
        log: BoundLogger,
    ) -> None:
        """`receive` returns messages without waiting. It returns a hello only if its router has replaced another one at
        the same address."""
        self.dropped: Counter[str] = Counter()
        """Messages dropped without an answer, by reason."""
        self.refused: Counter[str] = Counter()
        """Refused requests, by error code."""
        self.draining = False
        self._epoch = epoch
        self._receive = receive
        self._outbox = outbox
        self._tensors = tensors
        self._log = log
        self._messages: deque[Submit | Cancel | Hello] = deque()
        self._stops: list[Stop] = []
        self._submits: dict[int, Submit] = {}
        """By request."""
        self._num_live: dict[int, int] = {}
        """Number of each request's sequences that have not ended."""
        self._orphans: set[tuple[int, int]] = set()
        """(request, attempt) of requests whose router was replaced."""

    @property
    def waiting(self) -> bool:
        """Whether messages wait for the next step."""
        return bool(self._messages)

    def get_requests(self, limit: int) -> list[Submit]:
        """New requests, at most `limit`; requests beyond the limit are refused."""
        if not self._messages:
            self._messages.extend(self._receive())
        accepted: list[Submit] = []
        # In order of arrival. A request that needs the slot, or the number, of a request about to be stopped must wait
        # until that has ended, and all messages behind it wait too.
        while self._messages:
            message, room = self._messages[0], len(accepted) < limit
            if isinstance(message, Hello):
                self._orphans |= {(s.request, s.attempt) for s in self._submits.values() if s.router == message.address}
            # Another epoch: the message is for an earlier process at this address.
            elif message.engine_epoch != self._epoch:
                self._drop("other_epoch", message)
            elif isinstance(message, Cancel):
                self._stops.append(Stop(message.request, message.attempt, message.sequence))
            elif self._must_wait(message, room):
                break
            elif self._accept(message, room):
                accepted.append(message)
            self._messages.popleft()
        return accepted

    def poll_stop_ids(self) -> list[Stop]:
        stops, self._stops = self._stops, []
        return stops

    def take_orphans(self) -> set[tuple[int, int]]:
        """(request, attempt) of requests whose router was replaced, each returned once."""
        orphans, self._orphans = self._orphans, set()
        return orphans

    def send_responses(self, responses: Responses) -> None:
        for submit, fault in responses.refused:
            self._refuse(submit, fault)
        for opened in responses.opened:
            self._outbox.open(self._submits[opened.request].detokenizer, opened)
        for logprobs in responses.prompt_logprobs:
            self._outbox.put_prompt_logprobs(self._submits[logprobs.request].detokenizer, logprobs)
        for rows in responses.tensors:
            self._tensors.put(self._submits[rows.request].router, rows)
        by_address: defaultdict[str, list[TokenRow]] = defaultdict(list)
        for row in responses.rows:
            by_address[self._submits[row.request].detokenizer].append(row)
        for address, text_rows in by_address.items():
            self._outbox.put(address, text_rows)
        # After all rows were put: when a request's last sequence ends, its addresses are forgotten.
        for row in responses.rows:
            if row.end is not None:
                self._end_sequence(self._submits[row.request])
        self._outbox.flush()
        self._tensors.flush()

    def tensor_room(self, submit: Submit) -> int:
        """Bytes of tensors that may be put now for the request's router."""
        return self._tensors.room(submit.router)

    def _must_wait(self, submit: Submit, room: bool) -> bool:
        """Whether the request can begin only after the core has carried out stops. Stops an earlier attempt of the
        request, if there is one."""
        if self._stops and (not room or any(stop.request == submit.request for stop in self._stops)):
            return True
        current = self._submits.get(submit.request)
        if current is None or current.attempt >= submit.attempt:
            return False
        self._log.info("attempt_superseded", request_id=submit.name, attempt=current.attempt, by=submit.attempt)
        self._stops.append(Stop(current.request, current.attempt))
        return True

    def _accept(self, submit: Submit, room: bool) -> bool:
        """Whether the request goes to the core; if not, it has been refused or dropped."""
        if submit.request in self._submits:
            # The live attempt is the same or a later one.
            return self._drop("stale", submit)
        if not (1 <= submit.n <= MAX_SEQUENCES and submit.remaining):
            return self._drop("invalid", submit)
        try:
            self._connect(submit)
        except ValueError:
            return self._drop("bad_address", submit)
        self._submits[submit.request] = submit
        self._num_live[submit.request] = len(submit.remaining)
        fault = self._refusal(submit, room)
        if fault is not None:
            self._refuse(submit, fault)
        return fault is None

    def _connect(self, submit: Submit) -> None:
        """Open the lanes of the request's responses. Raises ValueError if an address is invalid or all lanes are in
        use."""
        self._outbox.connect(submit.detokenizer)
        if not _has_tensors(submit):
            return
        try:
            self._tensors.connect(submit.router)
        except ValueError:
            self._outbox.disconnect(submit.detokenizer)
            raise

    def _refusal(self, submit: Submit, room: bool) -> Fault | None:
        """Why the request is refused; None if it is not."""
        if self.draining:
            return Fault(ErrorCode.DRAINING.name, "the engine is shutting down")
        if not self._outbox.reaches(submit.detokenizer):
            message = f"the engine has no file descriptor left to connect to {submit.detokenizer}"
            return Fault(ErrorCode.OVERLOADED.name, message)
        if not room:
            return Fault(ErrorCode.OVERLOADED.name, "the engine has reached its limit of requests (max_requests)")
        return None

    def _refuse(self, submit: Submit, fault: Fault) -> None:
        """Answer every sequence with a terminal row."""
        self.refused[fault.code] += 1
        self._log.info("request_refused", request_id=submit.name, code=fault.code, reason=fault.message)
        self._outbox.open(submit.detokenizer, submit.opening())
        end = End(FinishReason.ERROR, Times(0.0, 0.0, 0.0), fault=fault)
        offsets = {index: len(submit.resume.get(index, ())) for index in submit.remaining}
        rows = [
            TokenRow(submit.request, submit.attempt, index, offset, [], [], end) for index, offset in offsets.items()
        ]
        self._outbox.put(submit.detokenizer, rows)
        for _ in rows:
            self._end_sequence(submit)

    def _end_sequence(self, submit: Submit) -> None:
        self._num_live[submit.request] -= 1
        if not self._num_live[submit.request]:
            del self._submits[submit.request], self._num_live[submit.request]
            self._outbox.disconnect(submit.detokenizer)
            if _has_tensors(submit):
                self._tensors.disconnect(submit.router)

    def _drop(self, reason: str, message: Submit | Cancel) -> bool:
        self.dropped[reason] += 1
        kind, request, attempt = type(message).__name__, message.request, message.attempt
        self._log.warning("message_dropped", reason=reason, kind=kind, request=request, attempt=attempt)
        return False


def _has_tensors(submit: Submit) -> bool:
    return submit.extras is not None and submit.extras.tensors is not None


@dataclass(eq=False)
class Orphans:
    """Finds and ends requests without a router. To be used in the engine's thread."""

    _engine: Engine
    _mailbox: Mailbox
    _routers: RouterTable
    _log: BoundLogger
    _check_at: float = field(default_factory=lambda: time.monotonic() + CHECK_SECONDS)

    def end(self) -> None:
        """End the requests whose router was replaced or, checked every CHECK_SECONDS, has fallen silent."""
        if orphans := self._mailbox.take_orphans():
            self._end_where("restarted", lambda submit: (submit.request, submit.attempt) in orphans)
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + CHECK_SECONDS
        routers = self._routers.live()
        self._end_where("silent", lambda submit: submit.router not in routers)

    def _end_where(self, why: str, orphaned: Callable[[Submit], bool]) -> None:
        # End with an error, not an abort: if the router is alive after all, it retries the request elsewhere.
        fault = Fault(ErrorCode.ROWS_LOST.name, f"the engine considered the router {why}")
        if ended := self._engine.end_where(orphaned, fault):
            self._log.warning(f"router_{why}", requests=ended)
