"""Places the attempts of requests, sends them to the ring, cancels them and gives them up."""

import time
from dataclasses import dataclass, field
from functools import partial

import msgspec
from structlog.stdlib import BoundLogger

from router.errors import RequestError
from router.parse.spec import fit
from router.peers.kv_groups import Computed
from router.peers.membership import Membership
from router.peers.offers import Offers, described, offering
from router.peers.peers import DetokenizerPeer, EnginePeer
from router.peers.placement import Placement
from router.requests import handover
from router.requests.attempt import Attempt, Candidates
from router.requests.cancel_queue import CancelQueue
from router.requests.registry import Requests
from router.requests.request_state import RequestPhase, RequestState
from router.requests.serving_model import ServingModel
from router.requests.suspects import Suspects
from sluice.wire.errors import ErrorCode
from sluice.wire.params import StopParams
from sluice.wire.requests import NO_EXTRAS, Cancel, Drop, Extras, Submit


@dataclass(eq=False)
class AttemptSender:
    """Charges an attempt to placement when it is sent, and releases the charge when it leaves the ring."""

    _requests: Requests
    _membership: Membership
    _placement: Placement
    _serving: ServingModel
    _suspects: Suspects
    _offers: Offers
    _address: str
    """Address of this router's inbox, to which the text is sent."""
    _log: BoundLogger
    _cancels: CancelQueue = field(default_factory=CancelQueue)

    def try_submit(self, request: RequestState) -> bool:
        """Place the request's next attempt and send it. False if no peer can accept it now.

        Raises RequestError CONTEXT_OVERFLOW, for a first attempt only, and MODEL_CHANGED.
        """
        self._serving.check(request, self._membership.engines.all)
        if request.preparing:
            # The pipeline has checked this for all engines. The engines that qualify for this request, known only now,
            # may hold fewer tokens.
            longest = self._offers.longest(self._reachable(request).engines)
            tokens = fit(request.spec, len(request.prompt), longest, self._offers.model_context_tokens)
            request.settle_max_tokens(tokens)
        candidates = self._candidates(request)
        # Only engines that would accept a Submit: full and unconnected lanes reject it, quarantined engines return it.
        ready = [peer for peer in candidates.engines if peer.lane.ready() and not peer.quarantined]
        for part in request.parts:
            ready = [peer for peer in ready if part.accepted_by(peer)]
        ring_size = self._ring_size()
        alone = self._suspects.is_quarantined(request.suspicion, ring_size)
        candidates = self._apply_quarantine(request, candidates._replace(engines=ready), ring_size if alone else None)
        if not candidates:
            return False
        # If no other peers are left, use those where the request has failed before.
        attempt = self._place(request, candidates.without(request.avoided) or candidates, alone)
        if not attempt.engine.lane.send(self._submit_message(request, attempt, alone)):
            return False
        if alone:
            self._enter_quarantine(request, attempt)
        self._placement.charge(attempt.choice)
        self._requests.enter_ring(request, attempt)
        return True

    def no_peers_error(self, request: RequestState) -> RequestError:
        """The error for a request whose first attempt found no peers."""
        if request.bound and not self._serving.engines_for(request, self._membership.engines.usable):
            return RequestError(ErrorCode.NO_ENGINE, f"no engine with the model {request.model} is available")
        if not offering(request.offers_needed, self._membership.engines.usable):
            needed = described(request.needs)
            return RequestError(ErrorCode.NO_ENGINE, f"no engine that supports {needed} is available")
        return RequestError(ErrorCode.NO_DETOKENIZER, "no engine can reach a detokenizer")

    def can_move(self, request: RequestState) -> bool:
        """Whether there are peers that could accept another attempt."""
        return bool(self._candidates(request))

    def on_tokens(self, request: RequestState) -> None:
        """Tokens of the current attempt have arrived, so its prompt has been computed."""
        if not request.attempt.has_tokens:
            request.on_first_token()
            self._placement.on_first_token(request.attempt.choice)

    def cancel(self, request: RequestState, sequence: int | None = None) -> None:
        """Cancel the attempt, or one sequence of it, at its engine. No effect if the whole attempt is being cancelled.

        The attempt stays on the ring until its terminal rows arrive.
        """
        if request.phase is RequestPhase.ON_RING:
            if sequence is None:
                request.move_to(RequestPhase.CANCELLING)
            self._send_cancel(request, sequence)

    def give_up(self, request: RequestState, phase: RequestPhase) -> None:
        """Stop waiting for the attempt on the ring. Rows of it that still arrive count as late. `phase`: the request's
        next phase."""
        attempt = request.attempt
        # Send a Cancel even if one was sent before, because it may have been lost. But not to a restarted engine, which
        # does not know the attempt.
        if attempt.engine in self._membership.engines.all:
            self._send_cancel(request)
        # If the detokenizer was restarted, the new process may have rows of the attempt: engines send to an address,
        # not to an epoch.
        for peer in self._membership.detokenizers.all:
            if peer.address == attempt.detokenizer.address:
                self._cancels.send(peer, Drop(request.number, attempt.number))
        self.leave_ring(request, phase)
        request.log.forget_start()
        request.log.forget_ends()

    def leave_ring(self, request: RequestState, phase: RequestPhase) -> None:
        """Take the request off the ring: no further row of its attempt is expected."""
        self._placement.release(request.attempt.choice, request.attempt.has_tokens)
        self._suspects.leave_quarantine(request.suspicion)
        self._requests.leave_ring(request, phase)

    def forget_peer(self, peer: EnginePeer | DetokenizerPeer, gone: bool) -> None:
        """Forget the load and the cache of a lost peer. `gone`: the peer's lane will be closed."""
        self._placement.forget(peer.epoch)
        if gone:
            self._cancels.forget(peer)

    def close(self) -> None:
        self._cancels.close()

    def _candidates(self, request: RequestState) -> Candidates:
        """Peers whose engines can hold the whole request."""
        total = len(request.prompt) + request.max_tokens
        reachable = self._reachable(request)
        engines = [peer for peer in reachable.engines if peer.heartbeat and peer.heartbeat.max_sequence_tokens >= total]
        return reachable._replace(engines=engines)

    def _reachable(self, request: RequestState) -> Candidates:
        """Peers whose engines serve the request's model and support its features, regardless of its length."""
        usable = Candidates.of(self._membership.engines.usable, self._membership.detokenizers.usable)
        serving = self._serving.engines_for(request, usable.engines)
        return usable._replace(engines=offering(request.offers_needed, serving))

    def _place(self, request: RequestState, candidates: Candidates, alone: bool) -> Attempt:
        if alone or not candidates.have_phases:
            return self._place_among(request, candidates)
        return handover.place(request, candidates, self._has_room, partial(self._place_among, request))

    def _has_room(self, engine: EnginePeer) -> bool:
        limit = engine.heartbeat.stats.max_requests if engine.heartbeat else 0
        return not limit or self._placement.requests(engine.epoch) < limit

    def _place_among(self, request: RequestState, candidates: Candidates) -> Attempt:
        choice = self._placement.choose(
            [peer.heartbeat for peer in candidates.engines if peer.heartbeat],
            [peer.heartbeat for peer in candidates.detokenizers if peer.heartbeat],
            request.prompt,
            request.domain,
            request.spec.sequences,
            request.virtual,
            Computed(request.computed_at, request.log.received),
        )
        engine = next(peer for peer in candidates.engines if peer.epoch == choice.engine)
        detokenizer = next(peer for peer in candidates.detokenizers if peer.epoch == choice.detokenizer)
        return Attempt(request.attempts, engine, detokenizer, choice, request.log.received, request.log.progress)

    def _ring_size(self) -> int:
        """Number of engines that are alive, or were alive so recently that they may return."""
        since = time.monotonic() - self._suspects.patience
        return sum(peer.alive or peer.last_heartbeat_at > max(0.0, since) for peer in self._membership.engines.all)

    def _apply_quarantine(self, request: RequestState, candidates: Candidates, ring_size: int | None) -> Candidates:
        """The candidates for this request. `ring_size` is given for a suspect that must run alone: it gets only the
        engine of its quarantine, or none. Any other request avoids the engine that is reserved for a suspect."""
        loads = {peer.epoch: self._placement.requests(peer.epoch) for peer in candidates.engines}
        if ring_size is not None:
            epoch = self._suspects.quarantine(request.suspicion, loads, ring_size)
            return candidates._replace(engines=[peer for peer in candidates.engines if peer.epoch == epoch])
        reserved = self._suspects.reserved(loads)
        return candidates if reserved is None else candidates.without({reserved})

    def _enter_quarantine(self, request: RequestState, attempt: Attempt) -> None:
        self._suspects.enter_quarantine(request.suspicion, attempt.engine.epoch)
        details = {"attempt": attempt.number, "engine": attempt.engine.name, "engine_deaths": request.suspicion.deaths}
        self._log.info("quarantine_entered", **request.log_ids, **details)

    def _submit_message(self, request: RequestState, attempt: Attempt, alone: bool) -> Submit:
        spec, given = request.spec, request.spec.stopping
        stop = StopParams(request.max_tokens, given.min_tokens, given.eos_token_ids, given.token_ids)
        elapsed = time.monotonic() - request.arrived
        assert attempt.detokenizer.heartbeat is not None  # noqa: S101 - only peers with a heartbeat are chosen
        return Submit(
            request=request.number,
            attempt=attempt.number,
            engine_epoch=attempt.engine.epoch,
            name=spec.request_id,
            prompt=request.prompt,
            n=spec.n,
            sampling=request.sampling,
            stopping=handover.limited(stop) if attempt.hands_over else stop,
            text=msgspec.structs.replace(spec.text, interval=request.interval),
            priority=spec.priority,
            salt=spec.salt,
            # At least 1 ms, because the message's bounds exclude 0: then the engine ends the request with TIME_LIMIT.
            time_limit=None if spec.time_limit is None else max(0.001, spec.time_limit - elapsed),
            detokenizer=attempt.detokenizer.heartbeat.address,
            router=self._address,
            resume=request.log.resume,
            ended=request.log.ended,
            alone=alone,
            tenant=request.tenant,
            extras=_extras(request, attempt),
        )

    def _send_cancel(self, request: RequestState, sequence: int | None = None) -> None:
        attempt = request.attempt
        self._cancels.send(attempt.engine, Cancel(request.number, attempt.number, attempt.engine.epoch, sequence))


def _extras(request: RequestState, attempt: Attempt) -> Extras | None:
    extras = Extras(
        retention=request.retention,
        client_id=request.spec.client_id,
        tables=request.tables,
        kv_keepers=list(attempt.choice.keepers),
        **request.submitted_parts(),
    )
    return None if extras == NO_EXTRAS else extras
