"""What requests need that not every engine may have: logits processors and tensors, by name, adapters, rows of
prompt tables, and images."""

from collections.abc import Iterable

from router.errors import shown
from router.peers.peers import EnginePeer
from router.requests.request_state import RequestState
from sluice.ring.tensors import LOGITS_NAMES


def having_features(request: RequestState, engines: Iterable[EnginePeer]) -> list[EnginePeer]:
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
    """What it needs, for an error."""
    kinds = {"logits processors": request.sampling.logits_processors, "tensors": sorted(_tensors(request))}
    adapter = request.spec.adapter
    kinds["adapters"] = [] if adapter is None else [adapter.id]
    found = [f"{kind} {', '.join(map(shown, names))}" for kind, names in kinds.items() if names]
    if (hidden_size := request.spec.hidden_size) is not None:
        found.append(f"prompt tables with rows of {hidden_size}")
    if (rows := request.spec.image_rows) is not None:
        found.append(f"images of {rows} tokens")
    return " and ".join(found)


def _tensors(request: RequestState) -> set[str]:
    wanted = request.spec.tensors
    return {*wanted.context, *wanted.output}.difference(LOGITS_NAMES)
