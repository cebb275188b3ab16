"""How much of it, and what became of the streams."""

import msgspec

from bench.deaths.killer import Death
from bench.deaths.played import Played
from bench.memory import Trail

SHOWN_FAULTS = 8


class Plan(msgspec.Struct, frozen=True):
    """How much of it."""

    streams: int = 64
    """At a time."""
    kills: int = 50
    seconds_between: float = 2.0
    """From kill to kill, on average."""
    max_tokens: int = 200
    routers: int = 2
    engines: int = 2
    detokenizers: int = 3
    seed: int = 0
    threads: int = 1
    """Of each engine."""

    @property
    def steps(self) -> int:
        """What `Tell` counts."""
        return self.streams + self.kills


class Result(msgspec.Struct, frozen=True):
    """What became of the streams. Times in seconds, lists of them sorted and of at most a thousand."""

    plan: Plan
    deaths: list[Death]
    """Since the first of the streams that could be disturbed."""
    quiet_seconds: float
    """That the watch of the memory had been running by then."""
    seconds: float
    streams: int
    failed: int
    """Ended with an error."""
    wrong: int
    """Differ from the undisturbed run, errors included."""
    resumed: int
    """Had to go on at another connection, for their router died."""
    quiet_first: list[float]
    """To the first token, of undisturbed streams."""
    quiet_stall: list[float]
    """Longest pause of each."""
    first: list[float]
    stall: list[float]
    faults: list[str]
    """The first few, in words."""
    memory: list[Trail]

    @property
    def killed(self) -> dict[str, int]:
        """By role."""
        roles = [death.role for death in self.deaths]
        return {role: roles.count(role) for role in sorted(set(roles))}


class Tally:
    """What the streams were like: of soaks there are too many to keep them all."""

    def __init__(self) -> None:
        self.streams = self.failed = self.wrong = self.resumed = self.repeated = 0
        self.first: list[float] = []
        self.stall: list[float] = []
        self.faults: list[str] = []

    def add(self, found: Played, truth: Played) -> None:
        """One more stream, and what it is undisturbed."""
        self.streams += 1
        self.failed += bool(found.faults)
        self.resumed += bool(found.resumed)
        self.repeated += found.repeated
        self.first.append(found.first_token)
        self.stall.append(found.stall)
        if difference := found.difference(truth):
            self.wrong += 1
            self.faults = [*self.faults, difference][:SHOWN_FAULTS]
