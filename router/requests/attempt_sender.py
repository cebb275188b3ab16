"""Attempts at a request: placed, sent to the ring, cancelled, given up."""

import time
from dataclasses import dataclass, field

import msgspec
from structlog.stdlib import BoundLogger

from router.errors import RequestError
from router.peers.adapters import Adapters
from router.peers.engine_features import EngineFeatures
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from router.peers.placement import Placement
from router.requests.attempt import Attempt
from router.requests.cancel_queue import CancelQueue
from router.requests.candidates import Candidates
from router.requests.features import described, having_features
from router.requests.registry import Requests
from router.requests.request_phase import RequestPhase
from router.requests.request_state import RequestState
from router.requests.serving_model import ServingModel
from router.requests.suspects import Suspects
from router.validate.context import fit
from sluice.ring.errors import ErrorCode
from sluice.ring.params import StopParams
from sluice.ring.wire import Cancel, Drop, Submit


@dataclass(eq=False)
class AttemptSender:
    """Charges an attempt to placement when it is sent, and releases the charge when it leaves the ring."""

    _requests: Requests
    _membership: Membership
    _placement: Placement
    _serving: ServingModel
    _suspects: Suspects
    _features: EngineFeatures
    _adapters: Adapters
    _address: str
    """Of this router's inbox, where the text is sent."""
    _log: BoundLogger
    _cancels: CancelQueue = field(default_factory=CancelQueue)

    def try_submit(self, request: RequestState) -> bool:
        """Place the request's next attempt and send it; False if no peer can take it now.

        Raises RequestError CONTEXT_OVERFLOW, for a first attempt only, and MODEL_CHANGED.
        """
        self._serving.check(request, self._membership.engines.all)
        if request.preparing:
            # Checked again after the pipeline: only now is it known which engines may take it, and these may hold less.
            longest = self._features.longest(self._reachable(request).engines)
            request.settle_max_tokens(fit(request.spec, len(request.prompt), longest))
        found = self._candidates(request)
        # Only engines that would accept a Submit: full and unconnected lanes reject it, quarantined engines return it.
        ready = [peer for peer in found.engines if peer.lane.ready() and not peer.quarantined]
        if (adapter := request.spec.adapter) is not None:
            ready = [peer for peer in ready if not self._adapters.loads.is_supplying(peer, adapter.version)]
        ring_size = self._ring_size()
        alone = self._suspects.is_quarantined(request.suspicion, ring_size)
        found = self._apply_quarantine(request, found._replace(engines=ready), ring_size if alone else None)
        if not found:
            return False
        # Peers where it failed before are better than none.
        attempt = self._place(request, found.without(request.avoided) or found)
        if not attempt.engine.lane.send(self._submit_message(request, attempt, alone)):
            return False
        if alone:
            self._enter_quarantine(request, attempt)
        self._placement.charge(attempt.choice)
        self._requests.enter_ring(request, attempt)
        return True

    def no_peers_error(self, request: RequestState) -> RequestError:
        """Why no peers were found for a request's first attempt."""
        if request.bound and not self._serving.engines_for(request, self._membership.engines.usable):
            return RequestError(ErrorCode.NO_ENGINE, f"no engine with the model {request.model} is alive")
        if not having_features(request, self._membership.engines.usable):
            return RequestError(ErrorCode.NO_ENGINE, f"no engine with all of the {described(request)} is alive")
        return RequestError(ErrorCode.NO_DETOKENIZER, "no engine can reach a detokenizer")

    def can_move(self, request: RequestState) -> bool:
        """Whether there are peers that could take another attempt."""
        return bool(self._candidates(request))

    def on_tokens(self, request: RequestState) -> None:
        """Tokens of this attempt have come, so its prompt is computed."""
        if not request.attempt.has_tokens:
            request.on_first_token()
            self._placement.on_first_token(request.attempt.choice)

    def cancel(self, request: RequestState, sequence: int | None = None) -> None:
        """Stop the attempt, or one sequence of it, at its engine; no effect if all of it is being cancelled.

        It stays on the ring until its terminal rows come.
        """
        if request.phase is RequestPhase.ON_RING:
            if sequence is None:
                request.move_to(RequestPhase.CANCELLING)
            self._send_cancel(request, sequence)

    def give_up(self, request: RequestState, phase: RequestPhase) -> None:
        """Stop waiting for the attempt on the ring; rows that still come of it are late. `phase` is the next one."""
        attempt = request.attempt
        # Even if a Cancel was sent before: it may have been lost. A restarted engine does not know the attempt.
        if attempt.engine in self._membership.engines.all:
            self._send_cancel(request)
        # A detokenizer's successor may have rows of it: engines send to its address, not to its epoch.
        for peer in self._membership.detokenizers.all:
            if peer.address == attempt.detokenizer.address:
                self._cancels.send(peer, Drop(request.number, attempt.number))
        self.leave_ring(request, phase)
        request.log.forget_start()
        request.log.forget_ends()

    def leave_ring(self, request: RequestState, phase: RequestPhase) -> None:
        """No row of its attempt is awaited any more."""
        self._placement.release(request.attempt.choice, request.attempt.has_tokens)
        self._suspects.leave_quarantine(request.suspicion)
        self._requests.leave_ring(request, phase)

    def forget_peer(self, peer: EnginePeer | DetokenizerPeer, gone: bool) -> None:
        """It was lost, with its load and its cache; `gone`: its lane will be closed."""
        self._placement.forget(peer.epoch)
        if gone:
            self._cancels.forget(peer)

    def close(self) -> None:
        self._cancels.close()

    def _candidates(self, request: RequestState) -> Candidates:
        """Peers whose engines can hold all of it."""
        total = len(request.prompt) + request.max_tokens
        found = self._reachable(request)
        able = [peer for peer in found.engines if peer.heartbeat and peer.heartbeat.max_sequence_tokens >= total]
        return found._replace(engines=able)

    def _reachable(self, request: RequestState) -> Candidates:
        """Peers whose engines serve its model and have what it needs, of any length."""
        found = Candidates.of(self._membership.engines.usable, self._membership.detokenizers.usable)
        serving = self._serving.engines_for(request, found.engines)
        return found._replace(engines=having_features(request, serving))

    def _place(self, request: RequestState, found: Candidates) -> Attempt:
        choice = self._placement.choose(
            [peer.heartbeat for peer in found.engines if peer.heartbeat],
            [peer.heartbeat for peer in found.detokenizers if peer.heartbeat],
            request.prompt,
            request.spec.domain,
            request.spec.sequences,
            request.virtual,
        )
        engine = next(peer for peer in found.engines if peer.epoch == choice.engine)
        detokenizer = next(peer for peer in found.detokenizers if peer.epoch == choice.detokenizer)
        return Attempt(request.attempts, engine, detokenizer, choice, request.log.received, request.log.progress)

    def _ring_size(self) -> int:
        """Engines that are alive, or were so recently that they may come back."""
        since = time.monotonic() - self._suspects.patience
        return sum(peer.alive or peer.last_heartbeat_at > max(0.0, since) for peer in self._membership.engines.all)

    def _apply_quarantine(self, request: RequestState, found: Candidates, ring_size: int | None) -> Candidates:
        """The candidates for this request. A suspect that must run alone (`ring_size` is given) gets only the engine of
        its quarantine, or none; any other request avoids the engine that is reserved for a suspect."""
        loads = {peer.epoch: self._placement.requests(peer.epoch) for peer in found.engines}
        if ring_size is not None:
            epoch = self._suspects.quarantine(request.suspicion, loads, ring_size)
            return found._replace(engines=[peer for peer in found.engines if peer.epoch == epoch])
        reserved = self._suspects.reserved(loads)
        return found if reserved is None else found.without({reserved})

    def _enter_quarantine(self, request: RequestState, attempt: Attempt) -> None:
        self._suspects.enter_quarantine(request.suspicion, attempt.engine.epoch)
        details = {"attempt": attempt.number, "engine": attempt.engine.name, "engine_deaths": request.suspicion.deaths}
        self._log.info("quarantine_entered", **request.log_ids, **details)

    def _submit_message(self, request: RequestState, attempt: Attempt, alone: bool) -> Submit:
        spec, stopping = request.spec, request.spec.stopping
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
            stopping=StopParams(request.max_tokens, stopping.min_tokens, stopping.eos_token_ids, stopping.token_ids),
            text=msgspec.structs.replace(spec.text, interval=request.interval),
            priority=spec.priority,
            salt=spec.salt,
            # Never negative, which is out of bounds: if the time is up, the engine ends it with TIME_LIMIT.
            time_limit=None if spec.time_limit is None else max(0.001, spec.time_limit - elapsed),
            detokenizer=attempt.detokenizer.heartbeat.address,
            router=self._address,
            retention=request.retention,
            resume=request.log.resume,
            ended=request.log.ended,
            alone=alone,
            speculation=spec.speculation,
            guide=spec.guide,
            client_id=spec.client_id,
            # All of a prompt's log-probabilities come before its first token.
            prompt_logprobs=None if request.log.prompt.complete else spec.prompt_logprobs,
            tensors=request.log.tensors.missing(request.log.live),
            adapter=spec.adapter,
            tables=request.tables,
        )

    def _send_cancel(self, request: RequestState, sequence: int | None = None) -> None:
        attempt = request.attempt
        self._cancels.send(attempt.engine, Cancel(request.number, attempt.number, attempt.engine.epoch, sequence))
