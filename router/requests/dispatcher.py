"""Submits requests to the ring and receives their rows."""

import asyncio
import time
from dataclasses import dataclass

import msgspec

from router.errors import Reason, RequestError, Violation
from router.peers.membership import Membership
from router.requests.appended import Appended
from router.requests.attempt_sender import AttemptSender
from router.requests.losses import Losses
from router.requests.recovery import Recovery
from router.requests.registry import RequestCounters, Requests
from router.requests.request_state import RequestPhase, RequestState
from router.requests.suspects import Suspects
from router.requests.tensor_log import MAX_WHOLE_BYTES
from sluice.wire.errors import CONTINUED, ErrorCode, Fault, FinishReason
from sluice.wire.rows import End, TextBatch, TextRow
from sluice.wire.tensors import TensorBatch, TensorRows

FULL_LANE_RETRY_SECONDS = 0.005


@dataclass(eq=False)
class Dispatcher:
    """Owns a request from its first submission to its last terminal row, over as many attempts as it takes."""

    _requests: Requests
    _membership: Membership
    _attempts: AttemptSender
    _recovery: Recovery
    _losses: Losses
    _suspects: Suspects
    _peer_wait: float
    """Seconds for which a first attempt waits for peers."""
    _counters: RequestCounters
    late_rows: int = 0
    """Rows received for requests or attempts that are no longer on the ring."""

    @property
    def between_attempts(self) -> int:
        """Number of requests that are recovering or paused."""
        return self._recovery.waiting

    async def submit(self, request: RequestState) -> None:
        """Place and send the first attempt, waiting for peers for up to `peer_wait` and for a lane with room. If the
        request is stopped in the meantime, nothing is sent.

        Raises RequestError NO_ENGINE, NO_DETOKENIZER, MODEL_CHANGED, CONTEXT_OVERFLOW.
        """
        deadline = time.monotonic() + self._peer_wait
        await self._membership.wait(deadline)
        # Poll, because a lane does not signal when it has room again.
        while request.log.open and not self._attempts.try_submit(request):
            await asyncio.sleep(FULL_LANE_RETRY_SECONDS)
            await self._membership.wait(deadline)
            if time.monotonic() > deadline and not self._attempts.can_move(request):
                raise self._attempts.no_peers_error(request)

    def abort(self, request: RequestState) -> None:
        """End a request with ABORTED and free its id immediately. Idempotent."""
        if request.aborted:
            return
        request.abort()
        self._requests.free_id(request)
        self._stop(request)
        if not request.on_ring:
            request.log.finish(FinishReason.ABORTED)

    def hand_back(self, request: RequestState, error: RequestError) -> None:
        """End a request with `error`, after everything that has arrived. Its client may resume it at another router."""
        request.log.fail(error)
        self._stop(request)

    def close_request(self, request: RequestState) -> None:
        """The request's response has ended. A running attempt is cancelled, and stays on the ring until its terminal
        rows arrive."""
        if request.preparing:
            request.end()
        else:
            self._stop(request)

    def on_text_batch(self, batch: TextBatch) -> None:
        for started in batch.started:
            request = self._current(started.request, started.attempt)
            if request is not None:
                request.on_started(started)
        for part in batch.prompt_logprobs:
            request = self._current(part.request, part.attempt)
            if request is not None and request.log.append_prompt_logprobs(part) is Appended.HOLE:
                message = f"log-probabilities of the prompt are missing before {part.start}"
                self._losses.give_up_attempt(request, ErrorCode.ROWS_LOST, message)
        for row in batch.rows():
            request = self._current(row.request, row.attempt)
            if request is None or not 0 <= row.sequence < request.spec.n:
                self.late_rows += 1
            else:
                self._ingest_row(request, row)

    def on_tensor_batch(self, batch: TensorBatch) -> None:
        for part in batch.parts:
            request = self._current(part.request, part.attempt)
            if request is None:
                self.late_rows += 1
            else:
                self._ingest_tensor(request, part)

    def close(self) -> None:
        self._recovery.close()
        self._attempts.close()

    def _stop(self, request: RequestState) -> None:
        """End a request in any phase. No effect if it has ended."""
        if request.on_ring and request.all_terminal:
            # Only tensor rows are missing: the engine has ended the request and would not answer a Cancel.
            self._attempts.leave_ring(request, RequestPhase.ENDED)
        elif request.on_ring:
            self._attempts.cancel(request)
        elif request.preparing:
            request.interrupt_preparation()
        else:
            self._recovery.cancel(request)
            request.end()

    def _current(self, number: int, attempt: int) -> RequestState | None:
        request = self._requests.numbered(number)
        return request if request is not None and request.attempt.number == attempt else None

    def _ingest_row(self, request: RequestState, row: TextRow) -> None:
        failed = row.end is not None and row.end.reason is FinishReason.ERROR
        continued = row.end is not None and row.end.reason in CONTINUED
        if row.tokens:
            self._attempts.on_tokens(request)
        # Append the tokens of a row that ends only the attempt, but not its end: another attempt may follow.
        appended = request.log.append(row._replace(end=None) if continued else _timed(request, row))
        if appended is Appended.TAKEN and row.tokens:
            self._counters.on_tokens(request, row.sequence, len(row.tokens))
            request.charge_output(len(row.tokens))
            if request.suspicion.suspected and request.past_probation:
                # Its engine accepts other requests again. The request stays a suspect until it has passed the token at
                # which an engine may have died.
                self._suspects.leave_quarantine(request.suspicion)
                if request.progressed:
                    self._suspects.clear(request.suspicion)
        if appended is Appended.HOLE and not failed:
            message = f"rows of sequence {row.sequence} are missing before {row.offset}"
            self._losses.give_up_attempt(request, ErrorCode.ROWS_LOST, message)
        elif row.end is not None:
            # Even if the log did not accept the row, for example after a fault: the sequence has ended anyway.
            self._end_sequence(request, row.sequence, row.end)
        self._pause_if_slow(request)

    def _ingest_tensor(self, request: RequestState, part: TensorRows) -> None:
        held = [sequence for sequence in request.log.sequences if sequence.held_end is not None]
        if request.log.append_tensor(part) is Appended.HOLE:
            message = f"rows of the tensor {part.name} are missing before {part.start}"
            self._losses.give_up_attempt(request, ErrorCode.ROWS_LOST, message)
            return
        for sequence in held:
            if sequence.end is not None and sequence.end.reason is FinishReason.STOP_STRING:
                self._attempts.cancel(request, sequence.index)
        if held and request.on_ring and request.all_terminal and not request.log.awaits_rows:
            self._attempts.leave_ring(request, RequestPhase.ENDED)
        if not request.spec.streaming and request.log.tensor_bytes > MAX_WHOLE_BYTES:
            self.hand_back(request, _too_large())
        self._pause_if_slow(request)

    def _pause_if_slow(self, request: RequestState) -> None:
        # Do not pause a request that is being cancelled: it would be submitted again.
        if request.phase is RequestPhase.ON_RING and self._recovery.too_slow(request):
            self._recovery.pause(request)

    def _end_sequence(self, request: RequestState, sequence: int, end: End) -> None:
        if end.reason is FinishReason.ERROR:
            fault = end.fault or Fault(ErrorCode.INTERNAL.name, "the request failed without a reason")
            for part in request.parts:
                fault = part.named(fault)
            self._losses.give_up(request, error_of(fault))
            return
        if end.reason is FinishReason.STOP_STRING and request.log.sequences[sequence].held_end is None:
            # The detokenizer found the stop string, but has no lane to the engine. So the router cancels the sequence.
            self._attempts.cancel(request, sequence)
        if end.reason is FinishReason.HANDED_OVER:
            request.on_handed_over(sequence, end.times)
        if request.on_terminal(sequence) and not request.log.awaits_rows:
            if request.handed_over or request.attempt.hands_over:
                self._losses.hand_over(request)
            else:
                self._attempts.leave_ring(request, RequestPhase.ENDED)


def _too_large() -> RequestError:
    problem = f"requests tensors of more than {MAX_WHOLE_BYTES} bytes, the limit of one message: use GenerateStream"
    return RequestError.at("spec.output", problem, reason=Reason.TOO_MANY)


def error_of(fault: Fault) -> RequestError:
    if not fault.field:
        return RequestError(fault.error_code, fault.message)
    return RequestError.invalid([Violation(fault.field, fault.message, private=True)], fault.error_code)


def _timed(request: RequestState, row: TextRow) -> TextRow:
    """`row` with the times of its end measured from the request's first submission."""
    if row.end is None:
        return row
    times = request.times_since_submit(row.end.times)
    return row._replace(end=msgspec.structs.replace(row.end, times=times))
