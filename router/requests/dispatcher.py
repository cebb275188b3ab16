"""Requests onto the ring, rows off it, and what the loss of a peer or of rows means for requests."""

import asyncio
import time

import msgspec
import structlog

from router.errors import RequestError
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from router.requests.attempts import Attempts, reaches
from router.requests.counters import RequestCounters
from router.requests.recovery import Recovery
from router.requests.registry import Requests, RequestState
from router.requests.suspects import Suspects
from router.requests.token_log import Appended
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.heartbeats import EngineHeartbeat
from sluice.ring.wire import TextBatch, TextRow, Times

FULL_LANE_RETRY_SECONDS = 0.005


class Dispatcher:
    """Owns the requests on the ring from their submit to their last terminal, over as many attempts as it takes."""

    def __init__(
        self,
        requests: Requests,
        members: Membership,
        attempts: Attempts,
        recovery: Recovery,
        suspects: Suspects,
        peer_wait: float,
        tally: RequestCounters,
        logger: structlog.stdlib.BoundLogger,
    ) -> None:
        self.late_rows = 0
        """Rows of requests or attempts that are not on the ring (any more)."""
        self._requests = requests
        self._members = members
        self._attempts = attempts
        self._recovery = recovery
        self._suspects = suspects
        self._peer_wait = peer_wait
        self._tally = tally
        self._logger = logger

    @property
    def between_attempts(self) -> int:
        """Requests whose attempt was given up and whose next one is still to come."""
        return self._recovery.waiting

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus output: the model's, or less where no engine that is alive can hold so much."""
        return self._attempts.context_tokens

    async def submit(self, live: RequestState) -> None:
        """Place the request and send it, waiting for peers up to a bound and for a lane with room.

        Raises RequestError NO_ENGINE, NO_DETOKENIZER, MODEL_CHANGED, CONTEXT_OVERFLOW. An aborted request is not sent.
        """
        deadline = time.monotonic() + self._peer_wait
        await self._members.wait(deadline)
        while not live.aborted and not self._attempts.try_submit(live):
            await asyncio.sleep(FULL_LANE_RETRY_SECONDS)
            await self._members.wait(deadline)
            if time.monotonic() > deadline and not self._attempts.can_move(live):
                raise self._attempts.refusal(live)

    def abort(self, live: RequestState) -> None:
        """End it with ABORTED, and free its id at once."""
        if live.aborted:
            return
        live.aborted = True
        self._requests.free_id(live)
        self._stop(live)
        if live.route is None:
            live.log.finish(FinishReason.ABORTED)

    def hand_back(self, live: RequestState, error: RequestError) -> None:
        """End it with an error, after what has come; its client may go on elsewhere."""
        live.log.fail(error)
        self._stop(live)

    def leave(self, live: RequestState) -> None:
        """Nobody waits for its answer any more."""
        self._stop(live)
        if live.route is None:
            live.give_permit_back()

    def take(self, batch: TextBatch) -> None:
        """News of many requests."""
        for started in batch.started:
            live = self._current(started.request, started.attempt)
            if live is not None:
                if live.attempt == 0 and live.log.started is None and live.permit is not None:
                    live.permit.found_cached(min(started.cached_tokens, len(live.prompt)))
                live.suspicion.started = True
                live.log.start(started)
        for row in batch.rows():
            live = self._current(row.request, row.attempt)
            if live is None or not 0 <= row.sequence < live.spec.n:
                self.late_rows += 1
            else:
                self._take_row(live, row)

    def lose(self, live: RequestState, code: ErrorCode, message: str) -> None:
        """Give an attempt up: the one place for it. Another one follows where that can help."""
        error = RequestError(code, message)
        if self._recovery.lose(live, error):
            return
        if live.aborted:
            live.log.finish(FinishReason.ABORTED)
        else:
            live.log.fail(error)
        live.give_permit_back()

    def lose_rows(self, detokenizer: str) -> int:
        """Messages of this detokenizer never came: whose they were nobody knows, and an end may be among them.

        How many requests that concerns.
        """
        concerned = [live for live in self._requests.on_ring if live.detokenizer == detokenizer]
        for live in concerned:
            self.lose(live, ErrorCode.ROWS_LOST, f"messages of the detokenizer {detokenizer} were lost")
        return len(concerned)

    def lose_rows_between(self, engine: int, detokenizer: DetokenizerPeer) -> int:
        """The same for messages of the engine with this epoch to that detokenizer."""
        concerned = 0
        for live in self._requests.on_ring:
            if live.route and live.route.engine.epoch == engine and live.route.detokenizer is detokenizer:
                name = live.route.engine.name
                self.lose(live, ErrorCode.ROWS_LOST, f"messages of {name} to {detokenizer.name} were lost")
                concerned += 1
        return concerned

    def lose_peer(self, peer: EnginePeer | DetokenizerPeer, why: str, gone: bool, died: bool = False) -> None:
        """It fell silent or stands still; or it has `gone` (restarted, off the list), and its lane will be closed.

        `died`: its process has ended, which may be the doing of a request aboard.
        """
        code = ErrorCode.ENGINE_LOST if isinstance(peer.heartbeat, EngineHeartbeat) else ErrorCode.DETOKENIZER_LOST
        on_ring = self._requests.on_ring
        aboard = [live for live in on_ring if live.route and peer in (live.route.engine, live.route.detokenizer)]
        poison = self._poison(peer, aboard) if died else None
        for live in aboard:
            if live is poison:
                self._end_poison(live)
            else:
                self.lose(live, code, f"{peer.name} {why}")
        self._attempts.forget(peer, gone)

    def leave_cut_off(self) -> None:
        """What runs at an engine from which nothing gets to its detokenizer goes on elsewhere."""
        cut = [engine for engine in self._members.engines.alive if engine.heartbeat and engine.heartbeat.cut_off]
        for live in self._requests.on_ring if cut else ():
            route = live.route
            if route is not None and route.engine in cut and not reaches(route.engine, route.detokenizer):
                message = f"nothing gets from {route.engine.name} to {route.detokenizer.name}"
                self.lose(live, ErrorCode.ROWS_LOST, message)

    def leave_draining(self) -> None:
        """What runs at a peer that drains goes on elsewhere at once, if anybody else is there."""
        members = self._members
        heard: list[EnginePeer | DetokenizerPeer] = [*members.engines.alive, *members.detokenizers.alive]
        draining = [peer for peer in heard if peer.draining]
        if not draining:
            return
        for live in self._requests.on_ring:
            route = live.route
            at = next((peer for peer in draining if route and peer in (route.engine, route.detokenizer)), None)
            if at is not None and not live.cancelled and self._attempts.can_move(live):
                self.lose(live, ErrorCode.DRAINING, f"{at.name} is draining")

    def close(self) -> None:
        """Send nothing more."""
        self._recovery.close()
        self._attempts.close()

    def _poison(self, dead: EnginePeer | DetokenizerPeer, aboard: list[RequestState]) -> RequestState | None:
        """Who of those aboard is to end for this death."""
        progress = {live.suspicion: live.progressed for live in aboard}
        if not isinstance(dead.heartbeat, EngineHeartbeat):
            self._suspects.peer_died(progress)
            return None
        for live in aboard:
            live.suspicion.unseen = live.unseen
        if dead.quarantine is None:
            self._suspects.engine_died(progress, None)
            return None
        alone = self._requests.numbered(dead.quarantine)
        # Where it is a request of another router, that router sees to it.
        return alone if alone in aboard and self._suspects.engine_died(progress, alone.suspicion) else None

    def _end_poison(self, live: RequestState) -> None:
        deaths = live.suspicion.deaths
        self._logger.error(
            "request kills engines",
            request_id=live.spec.request_id,
            tenant=live.tenant,
            engine=live.engine,
            engine_deaths=deaths,
            received_tokens=live.log.received,
        )
        self.lose(live, ErrorCode.POISON, f"{deaths} engines in a row died under this request")

    def _stop(self, live: RequestState) -> None:
        if live.route is not None:
            self._attempts.cancel(live)
        elif live.submitted is not None:
            self._recovery.stop(live)
            live.give_permit_back()
        elif live.queue is not None and not live.queue.expired():
            live.queue.reschedule(asyncio.get_running_loop().time())

    def _current(self, number: int, attempt: int) -> RequestState | None:
        live = self._requests.numbered(number)
        return live if live is not None and live.attempt == attempt else None

    def _take_row(self, live: RequestState, row: TextRow) -> None:
        failed = row.end is not None and row.end.reason is FinishReason.ERROR
        if row.tokens:
            self._attempts.begin(live)
        appended = live.log.append(row._replace(end=None) if failed else _timed(live, row))
        if appended is Appended.TAKEN and row.tokens:
            self._tally.heard(live, row.sequence, len(row.tokens))
            if live.permit is not None:
                live.permit.drew(len(row.tokens))
            if live.suspicion.suspected and live.progressed:
                self._suspects.clear(live.suspicion)
        if appended is Appended.HOLE and not failed:
            self.lose(live, ErrorCode.ROWS_LOST, f"rows of sequence {row.sequence} are missing before {row.offset}")
        elif row.end is not None:
            self._end_sequence(live, row)
        if live.route is not None and self._recovery.too_slow(live):
            self._recovery.pause(live)

    def _end_sequence(self, live: RequestState, row: TextRow) -> None:
        assert row.end is not None  # noqa: S101 - the caller looked
        if row.end.reason is FinishReason.ERROR:
            fault = row.end.fault or Fault(ErrorCode.INTERNAL.name, "the ring gave no reason")
            self.lose(live, fault.error_code, fault.message)
            return
        if row.end.reason is FinishReason.STOP_STRING:
            # The detokenizer found it; only the router can tell the engine.
            self._attempts.cancel_sequence(live, row.sequence)
        live.ended.add(row.sequence)
        if len(live.ended) == live.spec.n:
            self._attempts.end(live)


def _timed(live: RequestState, row: TextRow) -> TextRow:
    """Its end with times since the first submit, where this is not the first attempt."""
    if row.end is None or live.attempt == 0 or live.submitted is None:
        return row
    before, found = live.resubmitted - live.submitted, row.end.times
    if live.first_heard is not None and live.first_heard < live.resubmitted:
        context = live.first_heard - live.submitted
        times = Times(0.0, context, before - context + found.queue + found.context + found.generation)
    else:
        times = Times(before + found.queue, found.context, found.generation)
    return row._replace(end=msgspec.structs.replace(row.end, times=times))
