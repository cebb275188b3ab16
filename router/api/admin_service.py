"""sluice.v1.AdminService: what the heartbeats say, and draining."""

import asyncio
from importlib.metadata import PackageNotFoundError, version

from google.protobuf.timestamp_pb2 import Timestamp

from router.api.cache_flush import CacheFlush
from router.api.rpc import Context
from router.api.statistics import detokenizer_message, step_message
from router.api.stats_broadcast import StatsBroadcast
from router.errors import RequestError, Violation, seconds
from router.peers.membership import Membership
from router.requests.drain import Drain
from router.requests.serving_model import ServingModel
from sluice.v1 import admin_pb2 as pb

SHORTEST_INTERVAL = 0.1
LONGEST_INTERVAL = 86_400.0


class AdminService:
    """Each method answers one call."""

    def __init__(
        self,
        members: Membership,
        serving: ServingModel,
        steps: StatsBroadcast,
        drain: Drain,
        flush: CacheFlush,
        drain_seconds: float,
    ) -> None:
        self._members = members
        self._serving = serving
        self._steps = steps
        self._flush = flush
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._start = _now()

    async def get_server_info(self, _: pb.GetServerInfoRequest, __: Context) -> pb.GetServerInfoResponse:
        """About this router."""
        return pb.GetServerInfoResponse(version=_version(), start_time=self._start, draining=self._drain.begun)

    async def get_stats(self, _: pb.GetStatsRequest, __: Context) -> pb.GetStatsResponse:
        """The latest heartbeats."""
        return pb.GetStatsResponse(stats=self._stats())

    async def stream_stats(self, request: pb.StreamStatsRequest, context: Context) -> None:
        """The latest heartbeats, again and again."""
        interval = seconds(request.interval) if request.HasField("interval") else 1.0
        if not SHORTEST_INTERVAL <= interval <= LONGEST_INTERVAL:
            description = f"is {interval:g} s, must be in [{SHORTEST_INTERVAL:g}, {LONGEST_INTERVAL:g}] s"
            raise RequestError.invalid([Violation("interval", description)])
        while True:
            await context.write(pb.StreamStatsResponse(stats=self._stats()))
            await asyncio.sleep(interval)

    async def stream_steps(self, _: pb.StreamStepsRequest, context: Context) -> None:
        """Every step from now on; the call's initial metadata says when that is."""
        with self._steps.listen() as listener:
            await context.send_initial_metadata(())
            while True:
                await context.write(await listener.next())

    async def drain(self, request: pb.DrainRequest, _: Context) -> pb.DrainResponse:
        """For good; the process lives on until it gets a signal."""
        timeout = seconds(request.timeout) if request.HasField("timeout") else self._drain_seconds
        if not 0 <= timeout <= LONGEST_INTERVAL:
            description = f"is {timeout:g} s, must be in [0, {LONGEST_INTERVAL:g}] s"
            raise RequestError.invalid([Violation("timeout", description)])
        return pb.DrainResponse(aborted=await self._drain.run(timeout))

    async def flush_cache(self, _: pb.FlushCacheRequest, __: Context) -> pb.FlushCacheResponse:
        """On every engine; what live requests hold stays theirs."""
        return pb.FlushCacheResponse(blocks_freed=await self._flush.run())

    def _stats(self) -> pb.Stats:
        return pb.Stats(
            time=_now(),
            engines=[
                step_message(peer.heartbeat, peer.heartbeat.stats)
                for peer in self._members.engines.alive
                if peer.heartbeat
            ],
            detokenizers=[
                detokenizer_message(peer.heartbeat) for peer in self._members.detokenizers.alive if peer.heartbeat
            ],
            serving_model_fingerprint=self._serving.choose(self._members.engines.usable),
        )


def _now() -> Timestamp:
    now = Timestamp()
    now.GetCurrentTime()
    return now


def _version() -> str:
    try:
        return version("sluice")
    except PackageNotFoundError:
        return "unknown"
