"""Finds requests that kill engines: judges the requests aboard a dead engine and decides where suspects run.

A request that kills its engine does so at the same token in every attempt. So if an engine dies under an attempt that
has made almost no progress, its request becomes a suspect. A suspect runs in quarantine, alone on an engine, until it
has produced some tokens. A second successive death, while the engine reported that the request ran alone, convicts it.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

POISON_DEATHS = 2
"""Successive deaths, the last one in quarantine, after which a request is not retried."""
OTHER_DEATHS = 2
"""If this many peers died within OTHER_SECONDS without the request aboard, its own deaths may be chance. One more death
is then required to convict it."""
OTHER_SECONDS = 60.0
MAX_DEATHS_KEPT = 64
FEW_REQUESTS = 8
"""An engine with at most this many requests is vacated for a suspect immediately."""
VACATE_SECONDS = 10.0
"""Time for which a suspect waits for an engine with few requests. After that the least loaded engine is vacated or, if
the deaths may be chance, the suspect runs like any other request."""


@dataclass(slots=True, eq=False)
class Suspicion:
    """The suspicion against one request."""

    deaths: int = 0
    """Successive deaths under attempts that had made almost no progress, including deaths at other routers."""
    suspected: bool = False
    """Whether the request must run in quarantine."""
    since: float = 0.0
    """Time of the death that made the request a suspect, by the clock of `Suspects`."""
    touched: bool = False
    """Whether an engine has died under one of the request's attempts."""
    resumed: bool = field(init=False)
    """Whether some of the deaths happened at another router."""

    def __post_init__(self) -> None:
        self.resumed = self.deaths > 0


class Suspects:
    """Judges suspects, and owns this router's quarantine, of which there is one at a time. Identifies requests by their
    `Suspicion`."""

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A suspect waits at most `patience` seconds for its quarantine, then runs like any other request."""
        self.quarantines = 0
        """Number of attempts that ran in quarantine."""
        self.poisoned = 0
        """Number of convicted requests."""
        self.patience = patience
        self._clock = clock
        self._started = clock()
        self._deaths: deque[tuple[float, frozenset[Suspicion]]] = deque(maxlen=MAX_DEATHS_KEPT)
        """Deaths of engines and detokenizers, except those that a conviction explains: time, and requests aboard."""
        self._waiting: set[Suspicion] = set()
        """Requests between two attempts whose next attempt runs in quarantine."""
        self._others_waiting: set[Suspicion] = set()
        """All other requests between two attempts."""
        self._held: tuple[Suspicion, int] | None = None
        """The request in quarantine, and the epoch of its engine."""

    def engine_died(self, aboard: Mapping[Suspicion, bool], alone: Suspicion | None) -> bool:
        """An engine died. Returns whether `alone` is convicted.

        `aboard`: the requests on the engine, with whether they had progressed. `alone`: the request that the engine
        reported to run alone; if there is one, the death does not incriminate the others.
        """
        self.peer_died(aboard)
        stuck = [suspicion for suspicion, progressed in aboard.items() if not progressed]
        if alone in stuck:
            stuck = [alone]
        for suspicion, progressed in aboard.items():
            suspicion.touched = True
            if progressed:
                self.clear(suspicion)
        for suspicion in stuck:
            suspicion.deaths, suspicion.suspected, suspicion.since = suspicion.deaths + 1, True, self._clock()
        return alone in stuck and self._is_poison(alone)

    def peer_died(self, aboard: Mapping[Suspicion, bool]) -> None:
        """Record the death of an engine or a detokenizer as chance for all requests that were not aboard."""
        self._deaths.append((self._clock(), frozenset(aboard)))

    def clear(self, suspicion: Suspicion) -> None:
        """The request has progressed, so it is no longer a suspect."""
        suspicion.suspected, suspicion.deaths, suspicion.resumed = False, 0, False
        self.leave_quarantine(suspicion)

    def is_quarantined(self, suspicion: Suspicion, engines: int) -> bool:
        """Whether the request must run alone, in a ring with this number of engines. With a single engine, all other
        requests wait in the meantime."""
        if not suspicion.suspected:
            return False
        by_chance = self._by_chance(suspicion)
        patience = min(self.patience, VACATE_SECONDS) if by_chance else self.patience
        # With a single engine a quarantine stops all other requests, and after deaths by chance it may be pointless. So
        # require one more death in both cases.
        required = POISON_DEATHS - 1 if engines > 1 and not by_chance else POISON_DEATHS
        return suspicion.deaths >= required and self._clock() - suspicion.since <= patience

    def quarantine(self, suspicion: Suspicion, loads: Mapping[int, int], engines: int) -> int | None:
        """Epoch of the engine where the request can run alone now; None if it has to wait. `loads`: number of requests
        by the engine's epoch."""
        if self._held is not None or not loads:
            return None
        epoch = _least_loaded(loads)
        if len(loads) == 1 and engines > 1:
            # No other engine could accept the requests that run there or that are waiting.
            return None if loads[epoch] or self._others_waiting else epoch
        waited = self._clock() - suspicion.since
        return epoch if loads[epoch] <= FEW_REQUESTS or waited > VACATE_SECONDS else None

    def reserved(self, loads: Mapping[int, int]) -> int | None:
        """Epoch of the engine that a suspect uses or is about to get. Other requests avoid this engine if possible."""
        if self._held is not None:
            return self._held[1]
        if not self._waiting or len(loads) < 2:
            return None
        epoch = _least_loaded(loads)
        return epoch if loads[epoch] <= FEW_REQUESTS else None

    def enter_quarantine(self, suspicion: Suspicion, epoch: int) -> None:
        self._held = suspicion, epoch
        self.quarantines += 1

    def leave_quarantine(self, suspicion: Suspicion) -> None:
        """The attempt has ended or produced tokens. No effect for a request that is not in quarantine."""
        if self._held is not None and self._held[0] is suspicion:
            self._held = None

    def wait(self, suspicion: Suspicion) -> None:
        """The request waits for its next attempt."""
        (self._waiting if self.is_quarantined(suspicion, 2) else self._others_waiting).add(suspicion)

    def stop_waiting(self, suspicion: Suspicion) -> None:
        self._waiting.discard(suspicion)
        self._others_waiting.discard(suspicion)

    def _is_poison(self, suspicion: Suspicion) -> bool:
        if suspicion.deaths < POISON_DEATHS + self._by_chance(suspicion):
            return False
        self.poisoned += 1
        # These deaths are explained now, so they must not count as chance for another request.
        unexplained = [(at, aboard) for at, aboard in self._deaths if suspicion not in aboard]
        self._deaths = deque(unexplained, maxlen=MAX_DEATHS_KEPT)
        return True

    def _by_chance(self, suspicion: Suspicion) -> bool:
        """Whether peers die so often without this request aboard that its own deaths may be chance."""
        since = self._clock() - OTHER_SECONDS
        if suspicion.resumed and self._started > since:
            # This router does not know which peers died before it started.
            return True
        return sum(at > since and suspicion not in aboard for at, aboard in self._deaths) >= OTHER_DEATHS


def _least_loaded(loads: Mapping[int, int]) -> int:
    return min(loads, key=lambda epoch: (loads[epoch], epoch))
