"""What a system under test is asked to do, and what it saw: one seam for the engine, the ring and the peers."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request: greedy, on past EOS, so that its output length is known beforehand."""

    prompt: list[int]
    max_tokens: int


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests, and how they are handed in."""

    asks: Sequence[Ask]
    width: int
    """At most this many at a time; the next goes in as soon as one is out."""
    salt: str = ""
    """Prefix-cache domain: what one load computed another must not find."""
    ids: bool = False
    """Whether the token ids are wanted."""

    @property
    def tokens(self) -> int:
        """Output tokens wanted."""
        return sum(ask.max_tokens for ask in self.asks)


class Trace(msgspec.Struct, frozen=True):
    """What became of one request, in seconds since the load began."""

    submitted: float
    arrivals: list[float]
    """One per delta."""
    counts: list[int]
    """Tokens of each delta."""
    tokens: list[int]
    """All output token ids, if they were wanted."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache, where the system tells."""


class Run(msgspec.Struct, frozen=True):
    """What a system made of a load."""

    seconds: float
    """From the first submission to the last token."""
    cpu: dict[str, float]
    """CPU seconds by process."""
    traces: list[Trace]
    """In the order of the load's requests."""


R = TypeVar("R", bound=Run)
Given = TypeVar("Given", bound=Run, covariant=True)


class System(Protocol[Given]):
    """Something that can be measured."""

    @property
    def name(self) -> str:
        """For tables, and while it runs."""
        ...

    def run(self, load: Load) -> Given:
        """Serve the load."""
        ...


class Feed:
    """Which requests of a load go in next."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._next = 0
        self._live = 0

    def due(self) -> range:
        """Indices of the requests to submit now."""
        due = range(self._next, min(self._next + self._load.width - self._live, len(self._load.asks)))
        self._next = due.stop
        self._live += len(due)
        return due

    def ended(self, count: int = 1) -> None:
        """So many submitted requests have ended."""
        self._live -= count

    @property
    def live(self) -> bool:
        """Some submitted request has not ended."""
        return self._live > 0
