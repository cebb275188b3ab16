"""The content of /status.json. All services share one schema, and fill in the parts that apply to them."""

from typing import Literal

import msgspec

from sluice.telemetry.measures import Histogram
from sluice.wire.heartbeats import Phase
from sluice.wire.stats import StepStats

PeerState = Literal["serving", "draining", "stalled", "unreachable", "lost", "unknown"]
"""`unreachable`: the peer's connection has ended; `lost`: the peer has fallen silent; `unknown`: the peer has sent no
heartbeat yet."""


class EngineReport(msgspec.Struct, frozen=True):
    """An engine, described by itself or by a router. sluice.v1.EngineStats explains the numbers."""

    id: str
    state: PeerState
    address: str
    heartbeat_age: float | None = None
    """Seconds since its latest heartbeat; None: there was none, or the engine describes itself."""
    version: str = ""
    """Version of the engine's build."""
    model: str = ""
    """Fingerprint of weights, configuration and dtype."""
    model_version: str = ""
    """The operator's label for the model, or empty."""
    phase: Phase | None = None
    """The part of requests that it computes; None: not known, for want of a heartbeat."""
    iteration: int = 0
    active_requests: int = 0
    max_requests: int = 0
    scheduled_requests: int = 0
    max_batch_size: int = 0
    queued_requests: int = 0
    paused_requests: int = 0
    used_kv_blocks: int = 0
    max_kv_blocks: int = 0
    used_host_blocks: int = 0
    max_host_blocks: int = 0
    prefix_cache_hit_ratio: float = 0.0
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0

    def with_stats(self, stats: StepStats) -> "EngineReport":
        names = set(self.__struct_fields__) & set(stats.__struct_fields__)
        return msgspec.structs.replace(self, **{name: getattr(stats, name) for name in names})


class DetokenizerReport(msgspec.Struct, frozen=True):
    """A detokenizer, described by itself or by a router."""

    id: str
    state: PeerState
    address: str
    heartbeat_age: float | None = None
    """See `EngineReport`."""
    version: str = ""
    streams: int = 0
    queue_depth: int = 0
    """Messages and rows that wait to be processed."""
    tokens_per_second: float = 0.0


class RequestReport(msgspec.Struct, frozen=True):
    """A request in a router. Never its text."""

    id: str
    tenant: str
    state: str
    """The phase of an open request, the outcome of an ended one."""
    open: bool
    seconds: float
    """Time from its arrival until now, or until its end."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    attempts: int
    engine: str | None
    detokenizer: str | None
    first_token_seconds: float | None = None
    """Time from its arrival to its first token; None: it has none yet."""


class TenantReport(msgspec.Struct, frozen=True):
    """The requests of one tenant in a router."""

    tenant: str
    """Empty for requests without a tenant."""
    open: int
    waiting: int
    """Requests that wait for admission."""
    admitted: int


class Distribution(msgspec.Struct, frozen=True):
    """Counts since the start, by bucket; the last bucket is unbounded."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, histogram: Histogram) -> "Distribution":
        return cls(histogram.bounds, tuple(histogram.counts))


class RouterReport(msgspec.Struct, frozen=True):
    """The requests of a router; counts are since its start."""

    open: int
    on_ring: int
    waiting: int
    """Requests that wait for admission."""
    waiting_tokens: int
    """Tokens of the requests that wait for admission."""
    admitted: int
    admitted_limit: int
    between_attempts: int
    refused: int
    """Requests refused because the queue was full."""
    serving_version: str
    """Model version of the engines that get new requests; empty: any version."""
    outcomes: dict[str, int]
    """Ended requests by outcome."""
    recoveries: dict[str, int]
    """Recoveries by reason."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_seconds: Distribution
    inter_token_seconds: Distribution


class ServiceReport(msgspec.Struct, frozen=True):
    """A service's description of itself and of the peers that it knows. A part is None if it does not apply to the
    service."""

    address: str
    """Where the service listens."""
    router: RouterReport | None = None
    engines: list[EngineReport] | None = None
    detokenizers: list[DetokenizerReport] | None = None
    tenants: list[TenantReport] | None = None
    requests: list[RequestReport] | None = None
    """The latest requests, newest first."""


class StatusReport(msgspec.Struct, frozen=True):
    """The complete content of /status.json."""

    service: str
    """router, engine or detok."""
    id: str
    version: str
    model: str
    time: float
    """Seconds of the Unix epoch."""
    uptime: float
    """Seconds since the process began to start."""
    live: bool
    ready: bool
    reason: str
    """Why the service is not live or not ready; empty if it is both."""
    report: ServiceReport | None
    """None while the service is starting."""
