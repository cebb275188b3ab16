"""A load (planned requests), the run of a system under it, and the order in which requests are submitted."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol
from zlib import crc32

import msgspec
from msgspec.structs import replace

from sluice.wire.adapters import Adapter
from sluice.wire.params import RetentionParams
from sluice.wire.rows import TokenRow


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request of a load. Greedy by default; EOS is ignored, so that the output length is known in advance.

    Only `engine_alone` supports the fields after `max_tokens` and a load's `settings`.
    """

    prompt: list[int]
    max_tokens: int
    arrives: float | None = None
    """Time of submission: seconds after the last initial request got its first token. None: an initial request."""
    passed: float = 0.0
    """Seconds by which the engine's clock is advanced before this request, without waiting."""
    retention: RetentionParams = RetentionParams()
    ends_after: int | None = None
    """Output tokens after which the request is cancelled, as by a stop string. None: it runs to max_tokens."""
    temperature: float = 0.0
    expected: list[int] = []
    """Draft tokens from the caller: the expected output."""
    n: int = 1
    """Number of sequences."""
    beams: bool = False
    """Beam search with `n` beams, instead of sampling `n` sequences."""
    prompt_logprobs: int | None = None
    adapter: Adapter | None = None
    """LoRA adapter, loaded by path."""


class Load(msgspec.Struct, frozen=True):
    # "asks" on the wire: `bench.compare` also runs the code of older revisions.
    requests: Sequence[PlannedRequest] = msgspec.field(name="asks")
    width: int
    """Largest number of requests in flight; the next one is submitted as soon as one ends."""
    salt: str = ""
    """Salt of the prefix cache, so that a load has no prefix cache hits from another one."""
    with_ids: bool = False
    """Request token ids, as `Trace.tokens`."""
    settings: dict[str, Any] | None = None
    """If set, a new engine with these settings and an empty cache serves this load, in the memory of the process."""

    @property
    def tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(each.n * (each.ends_after or each.max_tokens) for each in self.requests)

    def salted(self) -> "Load":
        """For systems without salts: replaces the first two tokens of each prompt by a function of the salt. They are
        the same in all prompts, so that a common prefix of the load remains one."""
        number = crc32(self.salt.encode())
        head = [1 + number % 997, 1 + number // 997 % 997]
        salted = [replace(each, prompt=(head + each.prompt[2:])[: len(each.prompt)]) for each in self.requests]
        return replace(self, requests=salted)


class Trace(msgspec.Struct, frozen=True):
    """One request of a run. Times are seconds since the run began."""

    submitted: float
    arrivals: list[float]
    """Times of the deltas."""
    counts: list[int]
    """Tokens of each delta."""
    tokens: list[int]
    """Token ids of the output, if the load asked for them."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache, if the system reports them."""

    @property
    def first_token_ms(self) -> float:
        return 1000 * (self.arrivals[0] - self.submitted)


class Run(msgspec.Struct, frozen=True):
    """A system under one load."""

    seconds: float
    """From the first submission to the last token."""
    cpu: dict[str, float]
    """CPU seconds of each process, by name."""
    traces: list[Trace]
    """One per request, in the order of the load."""
    steps: int = 0
    """Steps of the engine; reported only by `engine_alone`, as are the following fields."""
    drafted: int = 0
    """Draft tokens verified."""
    accepted: int = 0
    """Draft tokens accepted."""


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
        due = range(self._next, min(self._next + self._load.width - self._live, len(self._load.requests)))
        self._next = due.stop
        self._live += len(due)
        return due

    def on_ended(self, count: int = 1) -> None:
        self._live -= count


class Arrivals:
    """A feed for a load that ends with timed requests, which are submitted at their time even beyond `width`."""

    def __init__(self, load: Load) -> None:
        self._requests = load.requests
        self._untimed = sum(request.arrives is None for request in load.requests)
        self._feed = Feed(replace(load, requests=load.requests[: self._untimed]))
        self._next = self._untimed
        self._silent = self._untimed
        """Number of initial requests that have no token yet."""
        self._zero = 0.0
        """When the last initial request got its first token; `arrives` counts from this time."""
        self._running = [request.n for request in load.requests]
        """Number of sequences that have not ended, by request."""
        self._unfinished = len(load.requests)

    @property
    def over(self) -> bool:
        """Whether every request has ended."""
        return not self._unfinished

    def due(self, now: float) -> Iterator[tuple[int, float]]:
        """Indices of the requests to submit now, and their times of arrival in seconds since the load began."""
        for i in self._feed.due():
            yield i, now
        while not self._silent and self._next < len(self._requests):
            at = self._zero + (self._requests[self._next].arrives or 0.0)
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
