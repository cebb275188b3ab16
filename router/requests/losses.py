"""Decides which attempts to give up when a peer is lost, frames are lost or a peer drains, and detects requests that
kill engines."""

from dataclasses import dataclass

from structlog.stdlib import BoundLogger

from router.errors import RequestError
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from router.requests.attempt import reaches
from router.requests.attempt_sender import AttemptSender
from router.requests.recovery import Recovery
from router.requests.registry import Requests
from router.requests.request_state import RequestPhase, RequestState
from router.requests.suspects import Suspects
from sluice.wire.errors import ErrorCode, FinishReason
from sluice.wire.heartbeats import EngineHeartbeat


@dataclass(eq=False)
class Losses:
    """Gives up attempts that cannot continue where they are, and starts the recovery of their requests."""

    _requests: Requests
    _membership: Membership
    _attempts: AttemptSender
    _recovery: Recovery
    _suspects: Suspects
    _log: BoundLogger

    def give_up_attempt(self, request: RequestState, code: ErrorCode, message: str) -> None:
        """Give up the attempt on the ring. The request is recovered if possible, and fails otherwise."""
        self.give_up(request, RequestError(code, message))

    def give_up(self, request: RequestState, error: RequestError) -> None:
        """Like `give_up_attempt`. Every lost attempt ends here."""
        if self._recovery.recover(request, error):
            return
        if request.aborted:
            request.log.finish(FinishReason.ABORTED)
        else:
            request.log.fail(error)

    def hand_over(self, request: RequestState) -> None:
        """An attempt that hands over has ended. Another engine continues what its first token did not end."""
        if request.handed_over and request.log.progress == request.attempt.progress_before:
            message = f"{request.engine} ended the attempt without a token"
            self.give_up_attempt(request, ErrorCode.ROWS_LOST, message)
        elif not self._recovery.hand_over(request) and request.aborted:
            request.log.finish(FinishReason.ABORTED)

    def on_frames_lost(self, detokenizer: int) -> int:
        """Give up the attempts that use this detokenizer, named by its epoch, after frames from it were lost. Returns
        their number."""
        # All of them: a gap does not show which rows were lost, and a terminal row may be among them.
        affected = [request for request in self._requests.on_ring if request.attempt.detokenizer.epoch == detokenizer]
        for request in affected:
            message = f"messages from the detokenizer {request.detokenizer} were lost"
            self.give_up_attempt(request, ErrorCode.ROWS_LOST, message)
        return len(affected)

    def on_frames_lost_between(self, engine: int, detokenizer: DetokenizerPeer) -> int:
        """Give up the attempts that use this engine, named by its epoch, and this detokenizer, after frames from the
        engine to the detokenizer were lost. Returns their number."""
        at_detokenizer = [request for request in self._requests.on_ring if request.attempt.detokenizer is detokenizer]
        affected = [request for request in at_detokenizer if request.attempt.engine.epoch == engine]
        for request in affected:
            message = f"messages from {request.engine} to {detokenizer.name} were lost"
            self.give_up_attempt(request, ErrorCode.ROWS_LOST, message)
        return len(affected)

    def on_tensor_frames_lost(self, engine: int) -> int:
        """Give up the attempts with tensors at this engine, named by its epoch, after frames with tensors were lost.
        Returns their number."""
        at_engine = [request for request in self._requests.on_ring if request.attempt.engine.epoch == engine]
        affected = [request for request in at_engine if request.log.tensors is not None]
        for request in affected:
            self.give_up_attempt(request, ErrorCode.ROWS_LOST, f"tensors from {request.engine} were lost")
        return len(affected)

    def on_peer_lost(self, peer: EnginePeer | DetokenizerPeer, why: str, gone: bool, died: bool = False) -> None:
        """Give up the attempts at a lost peer. `gone`: the peer's lane will be closed. `died`: its process ended
        without a drain."""
        code = ErrorCode.ENGINE_LOST if isinstance(peer.heartbeat, EngineHeartbeat) else ErrorCode.DETOKENIZER_LOST
        affected = [request for request in self._requests.on_ring if _is_at(request, peer)]
        poison = self._find_poison(peer, affected) if died else None
        for request in affected:
            if request is poison:
                self._end_poison(request)
            else:
                self.give_up_attempt(request, code, f"{peer.name} {why}")
        self._attempts.forget_peer(peer, gone)

    def move_off_cut_off(self) -> None:
        """Give up the attempts whose engine reports that it cannot reach their detokenizer."""
        cut_off = [peer for peer in self._membership.engines.alive if peer.heartbeat and peer.heartbeat.cut_off]
        for request in self._requests.on_ring if cut_off else ():
            engine, detokenizer = request.attempt.engine, request.attempt.detokenizer
            if engine in cut_off and not reaches(engine, detokenizer):
                self.give_up_attempt(request, ErrorCode.ROWS_LOST, f"{engine.name} cannot reach {detokenizer.name}")

    def move_off_draining(self) -> None:
        """Give up the attempts at peers that have been draining for DRAIN_SETTLE_SECONDS, once other peers can accept
        them."""
        membership = self._membership
        alive: list[EnginePeer | DetokenizerPeer] = [*membership.engines.alive, *membership.detokenizers.alive]
        draining = [peer for peer in alive if peer.should_empty]
        if not draining:
            return
        for request in self._requests.on_ring:
            peer = next((peer for peer in draining if _is_at(request, peer)), None)
            # An attempt that is being cancelled will end soon anyway.
            if peer is not None and request.phase is RequestPhase.ON_RING and self._attempts.can_move(request):
                self.give_up_attempt(request, ErrorCode.DRAINING, f"{peer.name} is draining")

    def _find_poison(self, dead: EnginePeer | DetokenizerPeer, affected: list[RequestState]) -> RequestState | None:
        """Record a peer's death. Returns the request that is convicted of having caused it, if any."""
        progress = {request.suspicion: request.progressed for request in affected}
        if not isinstance(dead.heartbeat, EngineHeartbeat):
            self._suspects.peer_died(progress)
            return None
        for request in affected:
            request.on_engine_died()
        if dead.quarantine is None:
            self._suspects.engine_died(progress, None)
            return None
        alone = self._requests.numbered(dead.quarantine)
        # If the request in quarantine is not ours, another router owns it and decides.
        return alone if alone in affected and self._suspects.engine_died(progress, alone.suspicion) else None

    def _end_poison(self, request: RequestState) -> None:
        deaths = request.suspicion.deaths
        details = {"engine": request.engine, "engine_deaths": deaths, "received_tokens": request.log.received}
        self._log.error("poison_request_ended", **request.log_ids, tenant=request.tenant, **details)
        self.give_up_attempt(request, ErrorCode.POISON, f"{deaths} engines in a row died under this request")


def _is_at(request: RequestState, peer: EnginePeer | DetokenizerPeer) -> bool:
    return peer is request.attempt.engine or peer is request.attempt.detokenizer
