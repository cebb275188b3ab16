"""Which request kills engines: what an engine's death says about the requests aboard, and where suspects run.

A request that kills its engine does so at the same token in every attempt. So a death under an attempt that had brought
next to nothing makes the request a suspect. A suspect runs in quarantine, alone on an engine, until it has brought some
tokens. A second death in a row, while the engine reported that the request ran alone, convicts it.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

POISON_DEATHS = 2
"""In a row, the last of them alone: the request is not tried again."""
OTHER_DEATHS = 2
"""Without the request aboard, within OTHER_SECONDS: chance explains a death as well, so one more is required."""
OTHER_SECONDS = 60.0
MAX_DEATHS_KEPT = 64
FEW_REQUESTS = 8
"""An engine with at most so many is vacated for a suspect at once."""
VACATE_SECONDS = 10.0
"""How long a suspect waits for such an engine. After that the least loaded engine is vacated or, if the deaths may be a
coincidence, the suspect runs like any other request."""


@dataclass(slots=True, eq=False)
class Suspicion:
    """What the deaths of engines say about one request."""

    deaths: int = 0
    """In a row, under attempts that had brought next to nothing; those at other routers count too."""
    suspected: bool = False
    """It must run in quarantine."""
    since: float = 0.0
    """When the death happened that made it a suspect, on the clock of `Suspects`."""
    touched: bool = False
    """An engine died under one of its attempts."""
    resumed: bool = field(init=False)
    """Some of the deaths happened at another router."""

    def __post_init__(self) -> None:
        self.resumed = self.deaths > 0


class Suspects:
    """The rule, and this router's only quarantine at a time. It knows requests by their `Suspicion`."""

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A suspect waits at most `patience` seconds for its quarantine, then runs like any other request."""
        self.quarantines = 0
        self.poisoned = 0
        """Requests that were convicted."""
        self.patience = patience
        self._clock = clock
        self._started = clock()
        self._deaths: deque[tuple[float, frozenset[Suspicion]]] = deque(maxlen=MAX_DEATHS_KEPT)
        """Of engines and detokenizers, without those that a conviction explains: when, and which requests aboard."""
        self._waiting: set[Suspicion] = set()
        """Requests between two attempts, the next of them in quarantine."""
        self._others_waiting: set[Suspicion] = set()
        self._held: tuple[Suspicion, int] | None = None
        """The request in quarantine, and the epoch of its engine."""

    def engine_died(self, aboard: Mapping[Suspicion, bool], alone: Suspicion | None) -> bool:
        """An engine died with these requests aboard, which had progressed or not; returns whether `alone` is convicted.

        `alone` is the request that the engine reported to run alone: then the death says nothing about the others.
        """
        self.peer_died(aboard)
        stuck = [each for each, progressed in aboard.items() if not progressed]
        if alone in stuck:
            stuck = [alone]
        for each, progressed in aboard.items():
            each.touched = True
            if progressed:
                self.clear(each)
        for each in stuck:
            each.deaths, each.suspected, each.since = each.deaths + 1, True, self._clock()
        return alone in stuck and self._is_poison(alone)

    def peer_died(self, aboard: Mapping[Suspicion, bool]) -> None:
        """Count a death, of an engine or a detokenizer, towards chance for all requests that were not aboard."""
        self._deaths.append((self._clock(), frozenset(aboard)))

    def clear(self, one: Suspicion) -> None:
        """It has progressed, so it is no suspect any more."""
        one.suspected, one.deaths, one.resumed = False, 0, False
        self.leave_quarantine(one)

    def is_quarantined(self, one: Suspicion, engines: int) -> bool:
        """Whether it must run alone, in a ring of so many engines. In a ring of one, all others wait meanwhile."""
        if not one.suspected:
            return False
        by_chance = self._by_chance(one)
        patience = min(self.patience, VACATE_SECONDS) if by_chance else self.patience
        # In a ring of one engine a quarantine stops all other requests, and after deaths by chance it may be pointless:
        # both ask for one death more.
        enough = POISON_DEATHS - 1 if engines > 1 and not by_chance else POISON_DEATHS
        return one.deaths >= enough and self._clock() - one.since <= patience

    def quarantine(self, one: Suspicion, loads: Mapping[int, int], engines: int) -> int | None:
        """Epoch of the engine where it can run alone now; None: it has to wait. `loads` are requests by engine."""
        if self._held is not None or not loads:
            return None
        epoch = _least_loaded(loads)
        if len(loads) == 1 and engines > 1:
            # No other engine could take the requests that run there, or those that wait.
            return None if loads[epoch] or self._others_waiting else epoch
        waited = self._clock() - one.since
        return epoch if loads[epoch] <= FEW_REQUESTS or waited > VACATE_SECONDS else None

    def reserved(self, loads: Mapping[int, int]) -> int | None:
        """Epoch of the engine that a suspect has or is about to get: other requests avoid it where they can."""
        if self._held is not None:
            return self._held[1]
        if not self._waiting or len(loads) < 2:
            return None
        epoch = _least_loaded(loads)
        return epoch if loads[epoch] <= FEW_REQUESTS else None

    def enter_quarantine(self, one: Suspicion, epoch: int) -> None:
        self._held = one, epoch
        self.quarantines += 1

    def leave_quarantine(self, one: Suspicion) -> None:
        """Its attempt has ended, or has brought tokens. No effect for requests that are not in quarantine."""
        if self._held is not None and self._held[0] is one:
            self._held = None

    def wait(self, one: Suspicion) -> None:
        (self._waiting if self.is_quarantined(one, 2) else self._others_waiting).add(one)

    def stop_waiting(self, one: Suspicion) -> None:
        self._waiting.discard(one)
        self._others_waiting.discard(one)

    def _is_poison(self, one: Suspicion) -> bool:
        if one.deaths < POISON_DEATHS + self._by_chance(one):
            return False
        self.poisoned += 1
        # These deaths are explained now, and must not excuse another request as chance.
        kept = [(at, aboard) for at, aboard in self._deaths if one not in aboard]
        self._deaths = deque(kept, maxlen=MAX_DEATHS_KEPT)
        return True

    def _by_chance(self, one: Suspicion) -> bool:
        """Whether peers die so often without it that its own deaths may well be chance."""
        since = self._clock() - OTHER_SECONDS
        if one.resumed and self._started > since:
            # Which others died before this router started is unknown here.
            return True
        return sum(at > since and one not in aboard for at, aboard in self._deaths) >= OTHER_DEATHS


def _least_loaded(loads: Mapping[int, int]) -> int:
    return min(loads, key=lambda epoch: (loads[epoch], epoch))
