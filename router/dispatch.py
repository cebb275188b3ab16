"""Requests onto the ring, rows off it: submits, cancels, and what the loss of a peer or of rows means for requests."""

import asyncio
import time

from router.cancels import Cancels
from router.errors import RequestError
from router.log import Appended
from router.members import Members
from router.peers import DetokenizerPeer, EnginePeer
from router.placement import Choice, Placement
from router.requests import Live, Requests, Route
from router.tally import Tally
from router.validate.context import fit
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.params import StopParams
from sluice.ring.wire import Cancel, EngineBeat, Submit, TextBatch, TextRow

FULL_LANE_RETRY_SECONDS = 0.005


class Dispatcher:
    """Owns the requests on the ring from their submit to their last terminal."""

    def __init__(
        self,
        requests: Requests,
        members: Members,
        placement: Placement,
        address: str,
        context_tokens: int,
        peer_wait: float,
        tally: Tally,
    ) -> None:
        self.late_rows = 0
        """Rows of requests that are not on the ring (any more)."""
        self._requests = requests
        self._members = members
        self._placement = placement
        self._address = address
        self._model_context_tokens = context_tokens
        self._peer_wait = peer_wait
        self._tally = tally
        self._cancels = Cancels()

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus output: the model's, or less where no engine that is alive can hold so much."""
        known = [peer.beat.max_sequence_tokens for peer in self._members.engines.usable if peer.beat]
        return min(self._model_context_tokens, max(known)) if known else self._model_context_tokens

    async def submit(self, live: Live) -> None:
        """Place the request and send it, waiting for peers up to a bound and for a lane with room.

        Raises RequestError NO_ENGINE, NO_DETOKENIZER, CONTEXT_OVERFLOW. An aborted request is not sent.
        """
        deadline = time.monotonic() + self._peer_wait
        await self._members.wait(deadline)
        while not live.aborted and not self._try_submit(live):
            await asyncio.sleep(FULL_LANE_RETRY_SECONDS)
            await self._members.wait(deadline)

    def abort(self, live: Live) -> None:
        """End it with ABORTED, and free its id at once."""
        if live.aborted:
            return
        live.aborted = True
        self._requests.free_id(live)
        if live.submitted is not None:
            self.cancel(live)
        elif live.queue is not None and not live.queue.expired():
            live.queue.reschedule(asyncio.get_running_loop().time())

    def cancel(self, live: Live) -> None:
        """Stop all of it at its engine. It stays on the ring until its terminals come."""
        if live.route is not None and not live.cancelled:
            live.cancelled = True
            engine = live.route.engine
            self._cancels.send(engine, Cancel(live.number, live.attempt, engine.epoch))

    def take(self, batch: TextBatch) -> None:
        """News of many requests."""
        for started in batch.started:
            live = self._current(started.request, started.attempt)
            if live is not None:
                if live.log.started is None and live.permit is not None:
                    live.permit.found_cached(min(started.cached_tokens, len(live.prompt)))
                live.log.start(started)
        for row in batch.rows():
            live = self._current(row.request, row.attempt)
            if live is None or not 0 <= row.sequence < live.spec.n:
                self.late_rows += 1
            else:
                self._take_row(live, row)

    def lose(self, live: Live, code: ErrorCode, message: str) -> None:
        """Give an attempt up. This is the one place for it: recovery by another attempt belongs here."""
        if live.aborted:
            live.log.finish(FinishReason.ABORTED)
        else:
            live.log.fail(RequestError(code, message))
        self.cancel(live)

    def lose_rows(self, detokenizer: str) -> None:
        """Messages of this detokenizer never came: whose they were nobody knows, and an end may be among them."""
        for live in self._requests.on_ring:
            if live.detokenizer == detokenizer:
                self.lose(live, ErrorCode.ROWS_LOST, f"messages of the detokenizer {detokenizer} were lost")
                self._release(live)

    def lose_peer(self, peer: EnginePeer | DetokenizerPeer, gone: bool) -> None:
        """It fell silent; or it has `gone` (restarted, taken off the list), and its lane will be closed."""
        is_engine = isinstance(peer.beat, EngineBeat)
        code = ErrorCode.ENGINE_LOST if is_engine else ErrorCode.DETOKENIZER_LOST
        for live in self._requests.on_ring:
            if live.route is not None and peer in (live.route.engine, live.route.detokenizer):
                # If it is not gone, a cancel sent before may be what was lost.
                live.cancelled = False
                self.lose(live, code, f"the {'engine' if is_engine else 'detokenizer'} {peer.name} was lost")
                self._release(live)
        self._placement.forget(peer.epoch)
        if gone:
            self._cancels.forget(peer)

    def close(self) -> None:
        """Send nothing more."""
        self._cancels.close()

    def _try_submit(self, live: Live) -> bool:
        max_tokens = fit(live.spec, len(live.prompt), self.context_tokens)
        total = len(live.prompt) + max_tokens
        engines = {
            peer.epoch: peer
            for peer in self._members.engines.usable
            if peer.beat and peer.beat.max_sequence_tokens >= total and peer.lane.ready()
        }
        detokenizers = {peer.epoch: peer for peer in self._members.detokenizers.usable}
        if not engines or not detokenizers:
            return False
        choice = self._choose(live, engines, detokenizers)
        route = Route(engines[choice.engine], detokenizers[choice.detokenizer], choice)
        if not route.engine.lane.send(self._submit_message(live, route, max_tokens)):
            return False
        self._placement.charge(choice)
        self._requests.put_on_ring(live, route)
        return True

    def _choose(self, live: Live, engines: dict[int, EnginePeer], detokenizers: dict[int, DetokenizerPeer]) -> Choice:
        return self._placement.choose(
            [peer.beat for peer in engines.values() if peer.beat],
            [peer.beat for peer in detokenizers.values() if peer.beat],
            live.prompt,
            live.spec.salt,
            live.spec.n,
        )

    def _submit_message(self, live: Live, route: Route, max_tokens: int) -> Submit:
        spec = live.spec
        elapsed = time.monotonic() - live.arrived
        assert route.detokenizer.beat is not None  # noqa: S101 - only peers that were heard are chosen
        return Submit(
            request=live.number,
            attempt=live.attempt,
            engine_epoch=route.engine.epoch,
            name=spec.request_id,
            prompt=live.prompt,
            n=spec.n,
            sampling=spec.sampling,
            stopping=StopParams(
                max_tokens, spec.stopping.min_tokens, spec.stopping.eos_token_ids, spec.stopping.token_ids
            ),
            text=spec.text,
            priority=spec.priority,
            salt=spec.salt,
            time_limit=None if spec.time_limit is None else max(0.001, spec.time_limit - elapsed),
            detokenizer=route.detokenizer.beat.address,
            router=self._address,
            retention=live.retention,
        )

    def _current(self, number: int, attempt: int) -> Live | None:
        live = self._requests.numbered(number)
        return live if live is not None and live.attempt == attempt else None

    def _take_row(self, live: Live, row: TextRow) -> None:
        if row.tokens:
            self._tally.heard(live, row.sequence, len(row.tokens))
            if live.permit is not None:
                live.permit.drew(len(row.tokens))
        if row.tokens and not live.begun and live.route is not None:
            live.begun = True
            self._placement.begun(live.route.choice)
        if row.end is not None and row.end.reason is FinishReason.ERROR:
            fault = row.end.fault or Fault(ErrorCode.INTERNAL.name, "the ring gave no reason")
            self._end_sequence(live, row.sequence, row.end.reason)
            self.lose(live, fault.error_code, fault.message)
            return
        if live.log.append(row) is Appended.HOLE:
            self.lose(live, ErrorCode.ROWS_LOST, f"rows of sequence {row.sequence} are missing before {row.offset}")
        if row.end is not None:
            self._end_sequence(live, row.sequence, row.end.reason)

    def _end_sequence(self, live: Live, sequence: int, reason: FinishReason) -> None:
        if reason is FinishReason.STOP_STRING and live.route is not None and not live.cancelled:
            # The detokenizer found it; only the router can tell the engine.
            engine = live.route.engine
            self._cancels.send(engine, Cancel(live.number, live.attempt, engine.epoch, sequence))
        live.ended.add(sequence)
        if len(live.ended) == live.spec.n:
            self._release(live)

    def _release(self, live: Live) -> None:
        if live.route is not None:
            self._placement.release(live.route.choice, live.begun)
        self._requests.take_off_ring(live)
        if live.permit is not None:
            live.permit.release()
