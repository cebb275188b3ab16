"""sluice.v1.AdminService: statistics, the serving version, calls to engines, cache flush, drain."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from google.protobuf.timestamp_pb2 import Timestamp

from router.api.admin_messages import (
    detokenizer_info,
    engine_info,
    events_message,
    request_summary,
    router_stats,
    tenant_stats,
)
from router.api.rpc import Context
from router.api.stats_broadcast import StatsBroadcast, step_message
from router.errors import Reason, RequestError, Violations, seconds, shown
from router.peers.cache_events import CacheEventReaders
from router.peers.engine_calls import EngineAnswers, EngineCalls
from router.peers.membership import Membership
from router.peers.peers import EnginePeer
from router.peers.placement import Placement
from router.requests.overview import Overview
from router.requests.registry import Requests
from router.requests.serving_model import ServingModel
from sluice.host.installation import BUILD_VERSION
from sluice.v1 import admin_pb2 as pb
from sluice.wire.calls import MAX_JSON_BYTES, MAX_METHOD_CHARS, MAX_RANKS, MethodCall, RankAnswer, parse_json
from sluice.wire.errors import ErrorCode
from sluice.wire.heartbeats import DetokenizerHeartbeat
from sluice.wire.requests import Flush

MAX_REQUESTS = 32
"""Requests listed in one snapshot of the statistics."""
SHORTEST_INTERVAL = 0.1
"""Seconds."""
LONGEST_INTERVAL = 86_400.0
"""Seconds."""
FLUSH_SECONDS = 5.0
"""Timeout for the answers of all engines."""
FLUSH_POLL_SECONDS = 0.05
CALL_SECONDS = 30.0
"""Default timeout of CallEngines."""
LONGEST_CALL_SECONDS = 3600.0
METHOD = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_METHOD_CHARS}}}", re.ASCII)


@dataclass(frozen=True)
class AdminService:
    _id: str
    """Id of this router."""
    _overview: Overview
    _models: Callable[[], list[pb.Model]]
    _membership: Membership
    _placement: Placement
    _serving: ServingModel
    _calls: EngineCalls
    _cache_events: CacheEventReaders
    _stats_broadcast: StatsBroadcast
    _requests: Requests
    _drain: Callable[[float], Awaitable[int]]
    """Called with the number of seconds after which open requests are handed back. Returns how many were."""
    _drain_seconds: float
    """Default timeout of a drain."""
    _start: Timestamp = field(default_factory=lambda: _now())

    async def get_server_info(self, _: pb.GetServerInfoRequest, __: Context) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            router_id=self._id,
            engines=map(engine_info, self._overview.engines()),
            detokenizers=map(detokenizer_info, self._overview.detokenizers()),
            models=self._models(),
            version=BUILD_VERSION,
            start_time=self._start,
            draining=self._requests.closed,
            serving_version=self._serving.version,
            serving_engines=self._serving.count(self._membership.engines.usable),
        )

    async def get_stats(self, _: pb.GetStatsRequest, __: Context) -> pb.GetStatsResponse:
        return pb.GetStatsResponse(stats=self._stats())

    async def stream_stats(self, message: pb.StreamStatsRequest, context: Context) -> None:
        interval = seconds(message.interval) if message.HasField("interval") else 1.0
        _check_range("interval", interval, SHORTEST_INTERVAL)
        while True:
            await context.write(pb.StreamStatsResponse(stats=self._stats()))
            await asyncio.sleep(interval)

    async def stream_steps(self, _: pb.StreamStepsRequest, context: Context) -> None:
        """Every step from now on. The initial metadata is sent immediately, so that the client knows that it is
        subscribed."""
        with self._stats_broadcast.subscribe() as subscription:
            await context.send_initial_metadata(())
            while True:
                await context.write(await subscription.next())

    async def stream_cache_events(self, message: pb.StreamCacheEventsRequest, context: Context) -> None:
        """The events that the engines still buffer, then every new one. The initial metadata is sent immediately.

        Raises RequestError INVALID_ARGUMENT, OVERLOADED.
        """
        with self._cache_events.open(message.engine_id) as reader:
            await context.send_initial_metadata(())
            while True:
                # Request the next events only once these are written: a slow client misses events, but delays no other.
                await context.write(events_message(await reader.next()))

    async def drain(self, message: pb.DrainRequest, _: Context) -> pb.DrainResponse:
        """Drain the router. Irreversible; the process keeps running until it gets a signal."""
        timeout = seconds(message.timeout) if message.HasField("timeout") else self._drain_seconds
        _check_range("timeout", timeout, 0)
        return pb.DrainResponse(aborted=await self._drain(timeout))

    async def flush_cache(self, _: pb.FlushCacheRequest, __: Context) -> pb.FlushCacheResponse:
        """Flush the prefix cache of every live engine. Requested over the ring; heartbeats acknowledge it.

        Blocks in use by live requests are kept. Raises RequestError NO_ENGINE, or ENGINE_LOST if an answer is late.
        """
        engines = self._membership.engines.alive
        if not engines:
            raise RequestError(ErrorCode.NO_ENGINE, "no engine is known to be alive")
        number = secrets.randbits(63)
        self._placement.forget_lost_caches()
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                freed = await asyncio.gather(*(self._flush(engine, number) for engine in engines))
        except TimeoutError:
            raise RequestError(ErrorCode.ENGINE_LOST, f"an engine did not answer within {FLUSH_SECONDS:g} s") from None
        return pb.FlushCacheResponse(blocks_freed=sum(freed))

    async def call_engines(self, message: pb.CallEnginesRequest, _: Context) -> pb.CallEnginesResponse:
        return await call_engines(message, self._calls)

    async def set_serving_version(
        self, message: pb.SetServingVersionRequest, _: Context
    ) -> pb.SetServingVersionResponse:
        """Set the model version for new requests at this router, until the process ends.

        Raises RequestError MODEL_NOT_FOUND.
        """
        usable = self._membership.engines.usable
        former = self._serving.set_version(message.version, usable)
        return pb.SetServingVersionResponse(
            former_version=former, version=self._serving.version, serving_engines=self._serving.count(usable)
        )

    async def _flush(self, engine: EnginePeer, number: int) -> int:
        while engine.alive and not engine.lane.send(Flush(engine.epoch, number)):
            await asyncio.sleep(FLUSH_POLL_SECONDS)
        self._placement.forget_cache(engine.epoch)
        while engine.alive:
            blocks = dict(engine.heartbeat.flushes if engine.heartbeat else ()).get(number)
            if blocks is not None:
                return blocks
            await asyncio.sleep(FLUSH_POLL_SECONDS)
        raise RequestError(ErrorCode.ENGINE_LOST, f"the engine {engine.name} was lost")

    def _stats(self) -> pb.Stats:
        engines, detokenizers = self._membership.engines, self._membership.detokenizers
        return pb.Stats(
            time=_now(),
            engines=[step_message(peer.heartbeat, peer.heartbeat.stats) for peer in engines.alive if peer.heartbeat],
            detokenizers=[_detokenizer_message(peer.heartbeat) for peer in detokenizers.alive if peer.heartbeat],
            serving_model_fingerprint=self._serving.choose(engines.usable),
            router=router_stats(self._id, self._overview.router()),
            tenants=map(tenant_stats, self._overview.tenants()),
            requests=map(request_summary, self._overview.latest_requests(MAX_REQUESTS)),
        )


def _check_range(field: str, value: float, least: float) -> None:
    """Raises RequestError INVALID_ARGUMENT if `value`, in seconds, is less than `least` or too large."""
    if not least <= value <= LONGEST_INTERVAL:
        description = f"is {value:g} s, must be in [{least:g}, {LONGEST_INTERVAL:g}] s"
        raise RequestError.at(field, description, reason=Reason.OUT_OF_RANGE)


def _detokenizer_message(heartbeat: DetokenizerHeartbeat) -> pb.DetokenizerStats:
    return pb.DetokenizerStats(
        detokenizer_id=heartbeat.detokenizer,
        streams=heartbeat.streams,
        queue_depth=heartbeat.queue_depth,
        tokens_per_second=heartbeat.tokens_per_second,
    )


def _now() -> Timestamp:
    now = Timestamp()
    now.GetCurrentTime()
    return now


async def call_engines(message: pb.CallEnginesRequest, calls: EngineCalls) -> pb.CallEnginesResponse:
    """Raises RequestError INVALID_ARGUMENT with every violation, or NO_ENGINE."""
    bad = Violations()
    timeout = CALL_SECONDS
    if message.HasField("timeout"):
        timeout = bad.duration("timeout", message.timeout, LONGEST_CALL_SECONDS)
    call = _parse_call(message, bad)
    bad.raise_if_any()
    engines = await calls.call(call, timeout)
    return pb.CallEnginesResponse(
        answers=[_answer(engine, answer, call.method) for engine in engines for answer in engine.answers]
    )


def _parse_call(message: pb.CallEnginesRequest, bad: Violations) -> MethodCall:
    if not METHOD.fullmatch(message.method):
        description = f"is {shown(message.method)}, must be 1 to {MAX_METHOD_CHARS} characters of A-Z a-z 0-9 _ . : -"
        bad.add("method", description, private=True)
    args, kwargs = message.args_json or "[]", message.kwargs_json or "{}"
    size = len(args.encode()) + len(kwargs.encode())
    if bad.at_most("args_json and kwargs_json", size, MAX_JSON_BYTES, "bytes together"):
        _check_json(bad, "args_json", args, "an array", lambda value: isinstance(value, list))
        _check_json(bad, "kwargs_json", kwargs, "an object", lambda value: isinstance(value, dict))
    bad.at_most("ranks", len(message.ranks), MAX_RANKS, "ranks")
    if max(message.ranks, default=0) >= MAX_RANKS:
        bad.add("ranks", f"names rank {max(message.ranks)}, must be below {MAX_RANKS}")
    return MethodCall(message.method, args, kwargs, tuple(message.ranks))


def _check_json(bad: Violations, field: str, text: str, kind: str, fits: Callable[[object], bool]) -> None:
    try:
        value = parse_json(text)
    except ValueError as error:
        bad.add(field, f"cannot be read as JSON: {error}", private=True)
        return
    if not fits(value):
        bad.add(field, f"is {shown(text)}, must be {kind}", private=True)


def _answer(engine: EngineAnswers, answer: RankAnswer, method: str) -> pb.RankAnswer:
    where = engine.engine if answer.rank is None else f"{engine.engine}, rank {answer.rank}"
    if answer.value is None:
        return pb.RankAnswer(engine_id=engine.engine, rank=answer.rank, error=f"{where}, {method}: {answer.error}")
    return pb.RankAnswer(engine_id=engine.engine, rank=answer.rank, value_json=answer.value)
