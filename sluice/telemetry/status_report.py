"""What /status.json of a service says. One shape for all three: a service fills the parts that it knows."""

from typing import Literal

import msgspec

from sluice.ring.stats import StepStats
from sluice.telemetry.histogram import Histogram

PeerState = Literal["serving", "draining", "stalled", "unreachable", "lost", "unknown"]
"""`unreachable`: its connection has ended; `lost`: it has fallen silent; `unknown`: it has sent no heartbeat yet."""


class EngineReport(msgspec.Struct, frozen=True):
    """An engine, by itself or as a router sees it. Numbers as in sluice.v1.EngineStats, which explains them."""

    id: str
    state: PeerState
    address: str
    heartbeat_age: float | None = None
    """Seconds since its latest heartbeat; None: there was none, or the engine reports about itself."""
    version: str = ""
    """Of its build."""
    model: str = ""
    """Fingerprint of weights, configuration and dtype."""
    model_version: str = ""
    iteration: int = 0
    active_requests: int = 0
    max_requests: int = 0
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
    """A detokenizer, by itself or as a router sees it."""

    id: str
    state: PeerState
    address: str
    heartbeat_age: float | None = None
    """As of an engine."""
    version: str = ""
    streams: int = 0
    queue_depth: int = 0
    """Messages and rows that wait."""
    tokens_per_second: float = 0.0


class RequestReport(msgspec.Struct, frozen=True):
    """A request in a router. Never its text."""

    id: str
    tenant: str
    state: str
    """Its phase while it is open, then its outcome."""
    open: bool
    seconds: float
    """From its arrival until now, or until its end."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    attempts: int
    engine: str | None
    detokenizer: str | None


class TenantReport(msgspec.Struct, frozen=True):
    """The requests of one tenant in a router."""

    tenant: str
    """Empty: of callers without a tenant."""
    open: int
    waiting: int
    """For admission."""
    admitted: int


class Distribution(msgspec.Struct, frozen=True):
    """Counts since the start, by bucket; the last bucket has no bound."""

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
    """For admission, as the next."""
    waiting_tokens: int
    admitted: int
    admitted_limit: int
    between_attempts: int
    refused: int
    """Because the queue was full."""
    serving_version: str
    """Of the engines that new requests go to; empty: any."""
    outcomes: dict[str, int]
    recoveries: dict[str, int]
    """By reason."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_seconds: Distribution
    inter_token_seconds: Distribution


class ServiceReport(msgspec.Struct, frozen=True):
    """What a service says about itself and those that it knows; None: it knows of no such thing."""

    address: str
    """Where it listens."""
    router: RouterReport | None = None
    engines: list[EngineReport] | None = None
    detokenizers: list[DetokenizerReport] | None = None
    tenants: list[TenantReport] | None = None
    requests: list[RequestReport] | None = None
    """The latest, newest first."""


class StatusReport(msgspec.Struct, frozen=True):
    """The whole of /status.json."""

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
    """Why it is not live or not ready; empty if it is both."""
    report: ServiceReport | None
    """None while it starts."""
