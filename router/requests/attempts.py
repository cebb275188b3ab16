"""An attempt at a request: placed and sent to the ring, cancelled, or given up."""

import time
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from router.errors import RequestError
from router.peers.membership import Membership
from router.peers.peers import DetokenizerPeer, EnginePeer
from router.peers.placement import Placement
from router.requests.cancels import Cancels
from router.requests.registry import Requests, RequestState, Route
from router.requests.serving_model import ServingModel
from router.requests.suspects import Suspects
from router.validate.spec import fit
from sluice.ring.errors import ErrorCode
from sluice.ring.params import StopParams
from sluice.ring.wire import Cancel, Drop, Submit

P = TypeVar("P", EnginePeer, DetokenizerPeer)


class _Candidates(NamedTuple):
    """Peers that could take an attempt, by epoch. Each engine reaches some of the detokenizers."""

    engines: dict[int, EnginePeer]
    detokenizers: dict[int, DetokenizerPeer]

    @classmethod
    def of(cls, engines: Iterable[EnginePeer], detokenizers: Iterable[DetokenizerPeer]) -> "_Candidates":
        """Without the engines that reach none of these."""
        them = {peer.epoch: peer for peer in detokenizers}
        return cls({peer.epoch: peer for peer in engines if any(reaches(peer, to) for to in them.values())}, them)

    def only(self, epoch: int | None) -> "_Candidates":
        """With this engine, or without any."""
        return self._replace(engines={} if epoch is None else {epoch: self.engines[epoch]})

    def without(self, avoided: set[int]) -> "_Candidates":
        """Without these epochs, where others are left."""
        return _Candidates.of(_without(self.engines, avoided), _without(self.detokenizers, avoided))

    def __bool__(self) -> bool:
        return bool(self.engines and self.detokenizers)


class Attempts:
    """Sends attempts, and takes back what they were charged."""

    def __init__(
        self,
        requests: Requests,
        members: Membership,
        placement: Placement,
        serving: ServingModel,
        suspects: Suspects,
        address: str,
        context_tokens: int,
        logger: structlog.stdlib.BoundLogger,
    ) -> None:
        """`address` is where the text is to come; `context_tokens` is the model's."""
        self._requests = requests
        self._members = members
        self._placement = placement
        self._serving = serving
        self._suspects = suspects
        self._logger = logger
        self._address = address
        self._model_context_tokens = context_tokens
        self._cancels = Cancels()

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus output: the model's, or less where no engine that is alive can hold so much."""
        return self._longest(self._members.engines.usable)

    def try_submit(self, live: RequestState) -> bool:
        """Place the request's next attempt and send it; False where nobody can take it now.

        Raises RequestError CONTEXT_OVERFLOW, for a first attempt only, and MODEL_CHANGED.
        """
        self._serving.check(live, self._members.engines.all)
        if live.submitted is None:
            live.max_tokens = fit(live.spec, len(live.prompt), self._longest(self._reachable(live).engines.values()))
        found = self._candidates(live)
        ready = {epoch: peer for epoch, peer in found.engines.items() if peer.lane.ready() and not peer.quarantined}
        ring = self._ring_size()
        alone = self._suspects.is_quarantined(live.suspicion, ring)
        found = self._separate(live, found._replace(engines=ready), ring if alone else None)
        if not found:
            return False
        engines, detokenizers = found.without(live.avoided) or found
        choice = self._placement.choose(
            [peer.heartbeat for peer in engines.values() if peer.heartbeat],
            [peer.heartbeat for peer in detokenizers.values() if peer.heartbeat],
            live.prompt,
            live.spec.salt,
            live.spec.n,
        )
        route = Route(engines[choice.engine], detokenizers[choice.detokenizer], choice)
        if not route.engine.lane.send(self._submit_message(live, route, alone)):
            return False
        if alone:
            self._enter_quarantine(live, route)
        self._placement.charge(choice)
        self._requests.put_on_ring(live, route)
        return True

    def refusal(self, live: RequestState) -> RequestError:
        """Of a request that found no peers for its first attempt."""
        if live.bound and not self._serving.engines_for(live, self._members.engines.usable):
            return RequestError(ErrorCode.NO_ENGINE, f"no engine with the model {live.model} is alive")
        return RequestError(ErrorCode.NO_DETOKENIZER, "nothing gets from the engines to the detokenizers")

    def can_move(self, live: RequestState) -> bool:
        """Whether peers are there that could take another attempt at it."""
        return bool(self._candidates(live))

    def begin(self, live: RequestState) -> None:
        """The first token of this attempt has come."""
        if live.route is not None and not live.begun:
            live.begun = True
            self._placement.on_first_token(live.route.choice)
            if live.first_heard is None:
                live.first_heard = time.monotonic()

    def cancel(self, live: RequestState) -> None:
        """Stop all of it at its engine. It stays on the ring until its terminals come."""
        if live.route is not None and not live.cancelled:
            live.cancelled = True
            self._send_cancel(live, live.route)

    def cancel_sequence(self, live: RequestState, sequence: int) -> None:
        """Stop one sequence at its engine: the detokenizer found its end."""
        if live.route is not None and not live.cancelled:
            self._send_cancel(live, live.route, sequence)

    def end(self, live: RequestState) -> None:
        """Every terminal has come."""
        self._take_off(live)
        live.give_permit_back()

    def give_up(self, live: RequestState) -> None:
        """Nothing more is awaited of this attempt; what still comes of it is late. The permit stays."""
        if live.route is None:
            return
        # Also where one was sent before: that may be what was lost. Who took an engine's place knows nothing of it.
        if live.route.engine in self._members.engines.all:
            self._send_cancel(live, live.route)
        # Who took the place of a detokenizer may: the engine goes by its address.
        for peer in self._members.detokenizers.all:
            if peer.address == live.route.detokenizer.address:
                self._cancels.send(peer, Drop(live.number, live.attempt))
        self._take_off(live)
        live.attempt += 1
        live.begun = live.cancelled = live.suspicion.started = False
        live.log.forget_start()

    def forget(self, peer: EnginePeer | DetokenizerPeer, gone: bool) -> None:
        """It was lost, with its load and its cache; `gone`: its lane will be closed."""
        self._placement.forget(peer.epoch)
        if gone:
            self._cancels.forget(peer)

    def close(self) -> None:
        """Send nothing more."""
        self._cancels.close()

    def _candidates(self, live: RequestState) -> _Candidates:
        total = len(live.prompt) + live.max_tokens
        found = self._reachable(live)
        engines = found.engines.items()
        return found._replace(
            engines={
                epoch: peer for epoch, peer in engines if peer.heartbeat and peer.heartbeat.max_sequence_tokens >= total
            }
        )

    def _reachable(self, live: RequestState) -> _Candidates:
        """With the engines that serve its model, of any length."""
        found = _Candidates.of(self._members.engines.usable, self._members.detokenizers.usable)
        return found._replace(
            engines={peer.epoch: peer for peer in self._serving.engines_for(live, found.engines.values())}
        )

    def _longest(self, engines: Iterable[EnginePeer]) -> int:
        known = [peer.heartbeat.max_sequence_tokens for peer in engines if peer.heartbeat]
        return min(self._model_context_tokens, max(known)) if known else self._model_context_tokens

    def _ring_size(self) -> int:
        """Engines that are there, or may come back."""
        since = time.monotonic() - self._suspects.patience
        return sum(peer.alive or peer.last_heartbeat_at > max(0.0, since) for peer in self._members.engines.all)

    def _separate(self, live: RequestState, found: _Candidates, ring: int | None) -> _Candidates:
        """Suspects, which come with the size of the ring, from all others."""
        loads = {epoch: self._placement.requests(epoch) for epoch in found.engines}
        if ring is not None:
            return found.only(self._suspects.quarantine(live.suspicion, loads, ring))
        reserved = self._suspects.reserved(loads)
        return found if reserved is None else found.without({reserved})

    def _enter_quarantine(self, live: RequestState, route: Route) -> None:
        self._suspects.enter_quarantine(live.suspicion, route.engine.epoch)
        self._logger.info(
            "quarantine",
            request_id=live.spec.request_id,
            attempt=live.attempt,
            engine=route.engine.name,
            engine_deaths=live.suspicion.deaths,
        )

    def _submit_message(self, live: RequestState, route: Route, alone: bool) -> Submit:
        spec = live.spec
        elapsed = time.monotonic() - live.arrived
        assert route.detokenizer.heartbeat is not None  # noqa: S101 - only peers that were heard are chosen
        return Submit(
            request=live.number,
            attempt=live.attempt,
            engine_epoch=route.engine.epoch,
            name=spec.request_id,
            prompt=live.prompt,
            n=spec.n,
            sampling=spec.sampling,
            stopping=StopParams(
                live.max_tokens, spec.stopping.min_tokens, spec.stopping.eos_token_ids, spec.stopping.token_ids
            ),
            text=msgspec.structs.replace(spec.text, interval=live.interval),
            priority=spec.priority,
            salt=spec.salt,
            time_limit=None if spec.time_limit is None else max(0.001, spec.time_limit - elapsed),
            detokenizer=route.detokenizer.heartbeat.address,
            router=self._address,
            retention=live.retention,
            resume=live.log.resume,
            ended=live.log.ended,
            alone=alone,
        )

    def _send_cancel(self, live: RequestState, route: Route, sequence: int | None = None) -> None:
        self._cancels.send(route.engine, Cancel(live.number, live.attempt, route.engine.epoch, sequence))

    def _take_off(self, live: RequestState) -> None:
        if live.route is not None:
            self._placement.release(live.route.choice, live.begun)
            self._suspects.leave_quarantine(live.suspicion)
        self._requests.take_off_ring(live)


def reaches(engine: EnginePeer, detokenizer: DetokenizerPeer) -> bool:
    """Whether rows get from one to the other, as far as the engine tells."""
    if engine.heartbeat is None or detokenizer.heartbeat is None:
        return False
    return detokenizer.heartbeat.address not in engine.heartbeat.cut_off


def _without(peers: dict[int, P], avoided: set[int]) -> Iterable[P]:
    return [peer for epoch, peer in peers.items() if epoch not in avoided] or peers.values()
