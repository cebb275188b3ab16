"""Broadcasts the engines' statistics to the callers of StreamSteps, as messages of the public API. Nothing is stored
for later subscribers."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from google.protobuf.timestamp_pb2 import Timestamp

from router.errors import duration
from sluice.v1 import admin_pb2 as pb
from sluice.wire.heartbeats import EngineHeartbeat
from sluice.wire.stats import RequestProgress, StatsSource, StepStats, request_fields, step_fields

CAPACITY = 8192
"""Maximum number of steps, and likewise of requests, that wait for one subscriber."""
MOMENTS = ("arrival", "first_scheduled", "first_token", "last_token")


@dataclass(eq=False)
class StatsBroadcast:
    """Each subscriber gets the statistics of all heartbeats that arrive after it has subscribed."""

    _capacity: int = CAPACITY
    _subscriptions: set["StatsSubscription"] = field(default_factory=set)
    lost: int = 0
    """Steps and requests dropped because a subscriber did not read them in time."""

    @property
    def subscribers(self) -> int:
        return len(self._subscriptions)

    def on_heartbeat(self, heartbeat: EngineHeartbeat) -> None:
        if not self._subscriptions or not (heartbeat.steps or heartbeat.requests):
            return
        steps = [step_message(heartbeat, step) for step in heartbeat.steps]
        requests = [request_message(heartbeat.engine, request) for request in heartbeat.requests]
        for subscription in self._subscriptions:
            self.lost += subscription.add(steps, requests)

    @contextmanager
    def subscribe(self) -> Iterator["StatsSubscription"]:
        subscription = StatsSubscription(self._capacity)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)


class StatsSubscription:
    """The buffer of one subscriber. If it reads too slowly, the oldest steps and requests are dropped."""

    def __init__(self, capacity: int) -> None:
        self._steps: deque[pb.EngineStats] = deque(maxlen=capacity)
        self._requests: deque[pb.RequestStats] = deque(maxlen=capacity)
        self._added = asyncio.Event()

    def add(self, steps: list[pb.EngineStats], requests: list[pb.RequestStats]) -> int:
        """Buffer steps and requests for the reader. Returns how many older ones were dropped."""
        held = len(self._steps) + len(self._requests)
        self._steps.extend(steps)
        self._requests.extend(requests)
        self._added.set()
        return held + len(steps) + len(requests) - len(self._steps) - len(self._requests)

    async def next(self) -> pb.StreamStepsResponse:
        """Everything added since the last call. Waits until there is something."""
        await self._added.wait()
        self._added.clear()
        response = pb.StreamStepsResponse(steps=self._steps, requests=self._requests)
        self._steps.clear()
        self._requests.clear()
        return response


def step_message(heartbeat: EngineHeartbeat, stats: StepStats) -> pb.EngineStats:
    """The state of one engine at one step. `time` is unset before the first step."""
    source = StatsSource(heartbeat.engine, heartbeat.fingerprint, heartbeat.model_version, heartbeat.max_batch_size)
    times = {"time": _timestamp(stats.time or None), "step_time": duration(stats.step_seconds)}
    return pb.EngineStats(**step_fields(stats, source, heartbeat.draining) | times)


def request_message(engine: str, stats: RequestProgress) -> pb.RequestStats:
    fields = request_fields(stats, engine, time.time())
    times = {name: _timestamp(fields[name]) for name in MOMENTS} | {"queued": duration(fields["queued"])}
    return pb.RequestStats(**fields | times)


def _timestamp(seconds: float | None) -> Timestamp | None:
    if seconds is None:
        return None
    timestamp = Timestamp()
    timestamp.FromNanoseconds(int(seconds * 1e9))
    return timestamp
