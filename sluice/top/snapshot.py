"""What `sluice top` shows: the answers of all routers at one moment, combined into one view of the ring."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from sluice.client import Client, SluiceError
from sluice.v1 import admin_pb2 as pb

PHASES = {pb.ENGINE_PHASE_PREFILL: "prefill", pb.ENGINE_PHASE_DECODE: "decode"}


class RouterRow(msgspec.Struct, frozen=True):
    address: str
    state: str
    """serving, draining or no answer."""
    error: str = ""
    """Why there is no answer."""
    id: str = ""
    version: str = ""
    open: int = 0
    waiting: int = 0
    admitted: int = 0
    max_admitted: int = 0
    recovering: int = 0
    recoveries: int = 0
    """Since the router's start, like `ended`."""
    ended: int = 0


class EngineRow(msgspec.Struct, frozen=True):
    id: str
    state: str
    version: str = ""
    """Version of the engine's build."""
    model: str = ""
    """The served name; empty, like the fingerprint, until the router has received a heartbeat of the engine."""
    model_fingerprint: str = ""
    model_version: str = ""
    """The version label, if the operator has set one."""
    phase: str = ""
    """prefill or decode; empty if it computes whole requests, or has not sent a heartbeat."""
    active: int = 0
    max_active: int = 0
    batch: int = 0
    """Outputs in the latest step."""
    max_batch: int = 0
    queued: int = 0
    paused: int = 0
    kv_blocks_used: int = 0
    kv_blocks: int = 0
    reuse: float = 0.0
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0

    @property
    def kv_fraction(self) -> float:
        """Fraction of the KV cache blocks that are in use."""
        return self.kv_blocks_used / self.kv_blocks if self.kv_blocks else 0.0


class DetokenizerRow(msgspec.Struct, frozen=True):
    id: str
    state: str
    version: str = ""
    streams: int = 0
    queue: int = 0
    tokens_per_second: float = 0.0


Row = TypeVar("Row", EngineRow, DetokenizerRow)


class TenantRow(msgspec.Struct, frozen=True):
    tenant: str
    open: int
    waiting: int
    admitted: int


class RequestRow(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    state: str
    open: bool
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    attempts: int
    router: str
    engine: str
    detokenizer: str
    first_token_seconds: float | None = None
    """None: it has no token yet."""

    @property
    def tokens_per_second(self) -> float:
        """From the request's arrival until now, or until its end."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0


class Snapshot(msgspec.Struct, frozen=True):
    time: float
    """Seconds of the Unix epoch."""
    models: list[str]
    routers: list[RouterRow]
    engines: list[EngineRow]
    detokenizers: list[DetokenizerRow]
    tenants: list[TenantRow]
    requests: list[RequestRow]
    """Open requests, then ended ones, each with the newest first."""

    @property
    def tokens_per_second(self) -> float:
        return sum(engine.tokens_per_second for engine in self.engines)


class Answer(msgspec.Struct, frozen=True):
    """A router's answers, or why there are none."""

    address: str
    info: pb.GetServerInfoResponse | None = None
    stats: pb.Stats | None = None
    error: str = ""


def query(client: Client, describe: Callable[[SluiceError, str], str] = lambda error, _: error.message) -> Answer:
    """Ask the one router of `client`. describe: (error, address) -> text for `Answer.error`."""
    (address,) = client.addresses
    try:
        return Answer(address, client.server_info(), client.stats())
    except SluiceError as error:
        return Answer(address, error=describe(error, address))


def combine(answers: Sequence[Answer], now: float | None = None) -> Snapshot:
    """One view of the ring from the answers of its routers. now: Unix time, by default the present."""
    engines: dict[str, EngineRow] = {}
    detokenizers: dict[str, DetokenizerRow] = {}
    tenants: dict[str, TenantRow] = {}
    requests: list[RequestRow] = []
    models: dict[str, None] = {}
    for answer in answers:
        if answer.info is None or answer.stats is None:
            continue
        models |= dict.fromkeys(model.name for model in answer.info.models)
        _keep_best(engines, _engines(answer.info, answer.stats))
        _keep_best(detokenizers, _detokenizers(answer.info, answer.stats))
        for tenant in answer.stats.tenants:
            tenants[tenant.tenant] = _sum(tenants.get(tenant.tenant), tenant)
        requests += (_request(request, answer.info.router_id) for request in answer.stats.requests)
    # A stable sort: the ended requests of a router keep their order.
    requests.sort(key=lambda row: (not row.open, row.seconds if row.open else 0.0))
    return Snapshot(
        time.time() if now is None else now,
        list(models),
        list(map(_router, answers)),
        sorted(engines.values(), key=lambda row: row.id),
        sorted(detokenizers.values(), key=lambda row: row.id),
        sorted(tenants.values(), key=lambda row: (-row.open, row.tenant)),
        requests,
    )


def _keep_best(rows_by_id: dict[str, Row], rows: Iterable[Row]) -> None:
    """Add another router's rows. If routers disagree about a peer, a row with the state "serving" is kept."""
    for row in rows:
        if row.id not in rows_by_id or rows_by_id[row.id].state != "serving":
            rows_by_id[row.id] = row


def _router(answer: Answer) -> RouterRow:
    if answer.info is None or answer.stats is None:
        return RouterRow(answer.address, "no answer", " ".join(answer.error.split()))
    info, stats = answer.info, answer.stats.router
    return RouterRow(
        answer.address,
        "draining" if info.draining else "serving",
        "",
        info.router_id,
        info.version,
        stats.open_requests,
        stats.waiting_requests,
        stats.admitted_requests,
        stats.max_admitted_requests,
        stats.recovering_requests,
        stats.recoveries,
        stats.ended_requests,
    )


def _engines(info: pb.GetServerInfoResponse, stats: pb.Stats) -> Iterable[EngineRow]:
    stats_by_id = {engine.engine_id: engine for engine in stats.engines}
    served = ", ".join(model.name for model in info.models)
    for engine in info.engines:
        numbers = stats_by_id.get(engine.engine_id, pb.EngineStats())
        yield EngineRow(
            engine.engine_id,
            _state(engine.state),
            engine.version,
            served if engine.model_fingerprint else "",
            engine.model_fingerprint,
            engine.model_version,
            PHASES.get(engine.phase, ""),
            numbers.active_requests,
            numbers.max_requests,
            numbers.scheduled_requests,
            numbers.max_batch_size,
            numbers.queued_requests,
            numbers.paused_requests,
            numbers.used_kv_blocks,
            numbers.max_kv_blocks,
            numbers.prefix_cache_hit_ratio,
            numbers.step_time.ToNanoseconds() / 1e9,
            numbers.tokens_per_second,
        )


def _detokenizers(info: pb.GetServerInfoResponse, stats: pb.Stats) -> Iterable[DetokenizerRow]:
    stats_by_id = {detokenizer.detokenizer_id: detokenizer for detokenizer in stats.detokenizers}
    for detokenizer in info.detokenizers:
        numbers = stats_by_id.get(detokenizer.detokenizer_id, pb.DetokenizerStats())
        yield DetokenizerRow(
            detokenizer.detokenizer_id,
            _state(detokenizer.state),
            detokenizer.version,
            numbers.streams,
            numbers.queue_depth,
            numbers.tokens_per_second,
        )


def _state(state: pb.PeerState.ValueType) -> str:
    return pb.PeerState.Name(state).removeprefix("PEER_STATE_").lower()


def _sum(row: TenantRow | None, stats: pb.TenantStats) -> TenantRow:
    """Add one router's numbers of a tenant to those of the other routers."""
    others = row or TenantRow(stats.tenant, 0, 0, 0)
    return TenantRow(
        stats.tenant,
        others.open + stats.open_requests,
        others.waiting + stats.waiting_requests,
        others.admitted + stats.admitted_requests,
    )


def _request(request: pb.RequestSummary, router: str) -> RequestRow:
    return RequestRow(
        request.request_id,
        request.tenant,
        request.state.lower(),
        request.open,
        request.duration.ToNanoseconds() / 1e9,
        request.prompt_tokens,
        request.cached_tokens,
        request.completion_tokens,
        request.attempts,
        router,
        request.engine_id,
        request.detokenizer_id,
        request.time_to_first_token.ToNanoseconds() / 1e9 if request.HasField("time_to_first_token") else None,
    )
