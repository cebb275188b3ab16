"""A load (requests), what a system made of it (a run), and which request goes in when."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol
from zlib import crc32

import msgspec
from msgspec.structs import replace

from sluice.ring.adapters import Adapter
from sluice.ring.params import RetentionParams
from sluice.ring.rows import TokenRow


class Ask(msgspec.Struct, frozen=True):
    """One request: greedy unless it says otherwise, ignoring EOS, so that its output length is known beforehand.

    Only the engine alone understands what follows `max_tokens`, and a load's `settings`.
    """

    prompt: list[int]
    max_tokens: int
    arrives: float | None = None
    """Seconds after all initial requests have their first token. None: an initial request."""
    passed: float = 0.0
    """Seconds by which the engine's clock is advanced, without waiting, before this request."""
    retention: RetentionParams = RetentionParams()
    ends_after: int | None = None
    """Output tokens after which it is cancelled, as by a stop string. None: it runs to max_tokens."""
    temperature: float = 0.0
    expected: list[int] = []
    """Tokens that the caller expects as the output: drafts."""
    n: int = 1
    """Sequences."""
    beams: bool = False
    """Search with `n` beams, instead of sampling as many sequences."""
    prompt_logprobs: int | None = None
    adapter: Adapter | None = None
    """Loaded by path."""


class Load(msgspec.Struct, frozen=True):
    asks: Sequence[Ask]
    width: int
    """Most requests in flight; the next is submitted as soon as one ends."""
    salt: str = ""
    """Prefix-cache domain: one load must not find what another computed."""
    with_ids: bool = False
    settings: dict[str, Any] | None = None
    """If given, a new engine with these settings and an empty cache serves this load, within the process's memory."""

    @property
    def tokens(self) -> int:
        return sum(ask.n * (ask.max_tokens if ask.ends_after is None else ask.ends_after) for ask in self.asks)

    def salted(self) -> "Load":
        """For systems without such domains: the salt in the first two tokens of each prompt, the same in all, so that
        what the prompts of one load share stays shared."""
        number = crc32(self.salt.encode())
        head = [1 + number % 997, 1 + number // 997 % 997]
        return replace(
            self, asks=[replace(ask, prompt=(head + ask.prompt[2:])[: len(ask.prompt)]) for ask in self.asks]
        )


class Trace(msgspec.Struct, frozen=True):
    submitted: float
    arrivals: list[float]
    counts: list[int]
    tokens: list[int]
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache, if the system reports them."""

    @property
    def first_token_ms(self) -> float:
        return 1000 * (self.arrivals[0] - self.submitted)


class Run(msgspec.Struct, frozen=True):
    seconds: float
    """From the first submission to the last token."""
    cpu: dict[str, float]
    traces: list[Trace]
    steps: int = 0
    """Of the engine alone, as what follows."""
    drafted: int = 0
    accepted: int = 0
    """Draft tokens."""


class System(Protocol):
    @property
    def name(self) -> str: ...

    def run(self, load: Load) -> Run: ...


class Feed:
    """Hands out the requests of a load by index, at most `width` in flight."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._next = 0
        self._live = 0

    def due(self) -> range:
        due = range(self._next, min(self._next + self._load.width - self._live, len(self._load.asks)))
        self._next = due.stop
        self._live += len(due)
        return due

    def on_ended(self, count: int = 1) -> None:
        self._live -= count


class Arrivals:
    """A feed whose load ends with timed requests: these are submitted at their time, whatever else is in flight."""

    def __init__(self, load: Load) -> None:
        self._asks = load.asks
        self._untimed = sum(ask.arrives is None for ask in load.asks)
        self._feed = Feed(replace(load, asks=load.asks[: self._untimed]))
        self._next = self._untimed
        self._silent = self._untimed
        """Initial requests without a token so far."""
        self._zero = 0.0
        """When the last of them got its first token: timed requests count from here."""
        self._running = [ask.n for ask in load.asks]
        """Sequences of each request that have not ended."""
        self._unfinished = len(load.asks)

    @property
    def over(self) -> bool:
        """Every request has ended."""
        return not self._unfinished

    def due(self, now: float) -> Iterator[tuple[int, float]]:
        """Requests to submit now, and when each of them arrived; seconds since the load began."""
        for i in self._feed.due():
            yield i, now
        while not self._silent and self._next < len(self._asks):
            at = self._zero + (self._asks[self._next].arrives or 0.0)
            if at > now:
                break
            self._next += 1
            yield self._next - 1, at

    def on_rows(self, now: float, rows: Iterable[tuple[int, TokenRow]]) -> None:
        for i, row in rows:
            if i < self._untimed and row.sequence == 0 and row.offset == 0 and row.tokens:
                self._silent -= 1
                self._zero = now
            self._running[i] -= row.end is not None
            if row.end is not None and not self._running[i]:
                self._unfinished -= 1
                if i < self._untimed:
                    self._feed.on_ended()
