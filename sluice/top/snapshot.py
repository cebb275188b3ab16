"""What `sluice top` shows: the answers of all routers at one moment, as one picture of the ring."""

import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from sluice.client import Client, SluiceError
from sluice.v1 import admin_pb2 as pb


class RouterRow(msgspec.Struct, frozen=True):
    address: str
    state: str
    """serving, draining or no answer."""
    error: str = ""
    id: str = ""
    version: str = ""
    open: int = 0
    waiting: int = 0
    admitted: int = 0
    max_admitted: int = 0
    recovering: int = 0
    recoveries: int = 0
    """Since the start, as the next."""
    ended: int = 0


class EngineRow(msgspec.Struct, frozen=True):
    id: str
    state: str
    version: str = ""
    """Of its build."""
    model: str = ""
    """Its name at the router; empty as the next while nothing has been heard of the engine."""
    model_fingerprint: str = ""
    model_version: str = ""
    """The version label that the operator set; otherwise empty."""
    active: int = 0
    max_active: int = 0
    queued: int = 0
    paused: int = 0
    kv_blocks_used: int = 0
    kv_blocks: int = 0
    reuse: float = 0.0
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0

    @property
    def kv_part(self) -> float:
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


class Snapshot(msgspec.Struct, frozen=True):
    time: float
    """Seconds of the Unix epoch."""
    models: list[str]
    routers: list[RouterRow]
    engines: list[EngineRow]
    detokenizers: list[DetokenizerRow]
    tenants: list[TenantRow]
    requests: list[RequestRow]
    """The open ones, then those that have ended; the newest first."""

    @property
    def tokens_per_second(self) -> float:
        return sum(engine.tokens_per_second for engine in self.engines)


class Answer(msgspec.Struct, frozen=True):
    """Of one router."""

    address: str
    info: pb.GetServerInfoResponse | None = None
    stats: pb.Stats | None = None
    error: str = ""


def ask(client: Client) -> Answer:
    """`client` has one address."""
    (address,) = client.addresses
    try:
        return Answer(address, client.server_info(), client.stats())
    except SluiceError as error:
        return Answer(address, error=error.message)


def combine(answers: Sequence[Answer], now: float | None = None) -> Snapshot:
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
        for each in answer.stats.tenants:
            tenants[each.tenant] = _sum(tenants.get(each.tenant), each)
        requests += (_request(each, answer.info.router_id) for each in answer.stats.requests)
    # Stable: those of one router that have ended stay in their order.
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


def _keep_best(found: dict[str, Row], rows: Iterable[Row]) -> None:
    """Of an engine that one router has lost and another one hears, what the latter says."""
    for row in rows:
        if row.id not in found or found[row.id].state != "serving":
            found[row.id] = row


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
    heard = {each.engine_id: each for each in stats.engines}
    served = ", ".join(model.name for model in info.models)
    for engine in info.engines:
        found = heard.get(engine.engine_id, pb.EngineStats())
        yield EngineRow(
            engine.engine_id,
            _state(engine.state),
            engine.version,
            served if engine.model_fingerprint else "",
            engine.model_fingerprint,
            engine.model_version,
            found.active_requests,
            found.max_requests,
            found.queued_requests,
            found.paused_requests,
            found.used_kv_blocks,
            found.max_kv_blocks,
            found.prefix_cache_hit_ratio,
            found.step_time.ToNanoseconds() / 1e9,
            found.tokens_per_second,
        )


def _detokenizers(info: pb.GetServerInfoResponse, stats: pb.Stats) -> Iterable[DetokenizerRow]:
    heard = {each.detokenizer_id: each for each in stats.detokenizers}
    for each in info.detokenizers:
        found = heard.get(each.detokenizer_id, pb.DetokenizerStats())
        yield DetokenizerRow(
            each.detokenizer_id,
            _state(each.state),
            each.version,
            found.streams,
            found.queue_depth,
            found.tokens_per_second,
        )


def _state(state: pb.PeerState.ValueType) -> str:
    return pb.PeerState.Name(state).removeprefix("PEER_STATE_").lower()


def _sum(before: TenantRow | None, stats: pb.TenantStats) -> TenantRow:
    old = before or TenantRow(stats.tenant, 0, 0, 0)
    return TenantRow(
        stats.tenant,
        old.open + stats.open_requests,
        old.waiting + stats.waiting_requests,
        old.admitted + stats.admitted_requests,
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
    )
