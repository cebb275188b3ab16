"""Matches requests with engines by optional features: named logits processors and tensors, adapters, prompt tables and
images."""

from collections.abc import Iterable

from router.errors import shown
from router.peers.peers import EnginePeer
from router.requests.request_state import RequestState
from sluice.wire.tensors import LOGITS_NAMES


def having_features(request: RequestState, engines: Iterable[EnginePeer]) -> list[EnginePeer]:
    """The engines that support every feature that the request uses."""
    processors, tensors = set(request.sampling.logits_processors), _tensors(request)
    return [
        peer
        for peer in engines
        if peer.heartbeat
        and processors.issubset(peer.heartbeat.logits_processors)
        and tensors.issubset(peer.heartbeat.tensors)
        and (request.spec.adapter is None or peer.heartbeat.has_adapters)
        and request.spec.hidden_size in (None, peer.heartbeat.hidden_size)
        and request.spec.image_rows in (None, peer.heartbeat.image_rows)
    ]


def described(request: RequestState) -> str:
    """The features that the request uses, for an error message."""
    adapter = request.spec.adapter
    kinds = {
        "logits processors": request.sampling.logits_processors,
        "tensors": sorted(_tensors(request)),
        "adapters": [] if adapter is None else [adapter.id],
    }
    features = [f"{kind} {', '.join(map(shown, names))}" for kind, names in kinds.items() if names]
    if (hidden_size := request.spec.hidden_size) is not None:
        features.append(f"prompt tables with rows of {hidden_size} values")
    if (rows := request.spec.image_rows) is not None:
        features.append(f"images of {rows} tokens")
    return " and ".join(features)


def _tensors(request: RequestState) -> set[str]:
    tensors = request.spec.tensors
    return {*tensors.context, *tensors.output}.difference(LOGITS_NAMES)
