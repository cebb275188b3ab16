"""Prefill and decode apart: one engine computes a prompt and the first token, another one continues.

A plain ring, whose engines all compute everything, never enters this file.

An attempt that hands over is an ordinary attempt with `StopParams.hands_over` and max_tokens 1. The engine ends each
sequence after its first token, unless that token ends it anyway, with HANDED_OVER. To the detokenizer this is the end
of an attempt like any other that another one continues: it holds back what it would hold back in the middle of a
stream. To the router it is the request for the next attempt (`Recovery.hand_over`), which continues after this token on
an engine that copies the blocks of the prompt.

Phases are preferences: where they cannot be followed, any engine computes everything. Every failure is a lost attempt
and its ordinary recovery.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from router.peers.peers import EnginePeer
from router.requests.attempt import Attempt, Candidates
from router.requests.request_state import RequestState
from sluice.wire.heartbeats import Phase
from sluice.wire.params import StopParams

HAND_OVER_TOKENS = 256
"""Tokens of a prompt from which handing over pays. Fewer delay the running streams of an engine less than a second
attempt delays this one."""


def place(
    request: RequestState,
    candidates: Candidates,
    has_room: Callable[[EnginePeer], bool],
    place_among: Callable[[Candidates], Attempt],
) -> Attempt:
    """The next attempt of a request in a ring with phases.

    It generates on an engine that generates, unless that engine would have to compute a long prompt first: then an
    engine of the prefill phase does, and hands over.
    """
    generating, prefilling = _divide([peer for peer in candidates.engines if has_room(peer)] or candidates.engines)
    attempt = place_among(candidates._replace(engines=generating))
    if not prefilling or attempt.choice.uncached_tokens < HAND_OVER_TOKENS or not _can_continue_elsewhere(request):
        return attempt
    both = [peer for peer in generating if _phase(peer) != "decode"]
    attempt = place_among(candidates._replace(engines=[*prefilling, *both]))
    return replace(attempt, hands_over=attempt.engine in prefilling and request.max_tokens > 1)


def limited(stopping: StopParams) -> StopParams:
    """`stopping` of an attempt that hands over."""
    return msgspec.structs.replace(stopping, max_tokens=1, hands_over=True)


def _divide(engines: Iterable[EnginePeer]) -> tuple[list[EnginePeer], list[EnginePeer]]:
    """(engines that generate, engines that only prefill). An engine of the prefill phase generates too if no other
    engine could copy its blocks."""
    generating = [peer for peer in engines if _phase(peer) != "prefill"]
    readable = {source for peer in generating for source in _sources(peer)}
    prefilling: list[EnginePeer] = []
    for peer in engines:
        if _phase(peer) == "prefill":
            (prefilling if _sources(peer) & readable else generating).append(peer)
    return generating, prefilling


def _phase(peer: EnginePeer) -> Phase:
    return "both" if peer.heartbeat is None else peer.heartbeat.phase


def _sources(peer: EnginePeer) -> set[tuple[str, str]]:
    """Blocks that the engine can copy, and those that others can copy from it: (group, model) for its machine, and with
    a keeper (layout, model) for all others."""
    heartbeat = peer.heartbeat
    if heartbeat is None:
        return set()
    names = {heartbeat.kv_group, heartbeat.kv_layout if heartbeat.kv_keeper else ""} - {""}
    return {(name, heartbeat.fingerprint) for name in names}


def _can_continue_elsewhere(request: RequestState) -> bool:
    """Whether the next attempt can end after one token.

    Not after the first token, since then the prompt has been computed. Not with beams, which every attempt searches
    from the start; with tables and images, whose rows two engines would have to compute or receive; or with tensors,
    whose rows arrive by a lane of their own, after the tokens.
    """
    log = request.log
    begun = any(sequence.received or sequence.end is not None for sequence in log.sequences)
    return not begun and request.sampling.beam_search is None and request.tables is None and log.tensors is None
