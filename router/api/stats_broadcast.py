"""What engines tell of their steps and requests, to whoever listens now. Nothing is kept for later."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from router.api.statistics import request_message, step_message
from sluice.ring.heartbeats import EngineHeartbeat
from sluice.v1 import admin_pb2 as pb

CAPACITY = 8192
"""StatsBroadcast, and requests likewise, that wait for a listener at most."""


class StatsBroadcast:
    """Every listener gets what comes from now on."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.lost = 0
        """StatsBroadcast and requests that came faster than a listener took them."""
        self._capacity = capacity
        self._listeners: set[Listener] = set()

    @property
    def listeners(self) -> int:
        """How many there are."""
        return len(self._listeners)

    def hear(self, heartbeat: EngineHeartbeat) -> None:
        """News of one engine."""
        if not self._listeners or not (heartbeat.steps or heartbeat.requests):
            return
        steps = [step_message(heartbeat, step) for step in heartbeat.steps]
        requests = [request_message(heartbeat.engine, request) for request in heartbeat.requests]
        for listener in self._listeners:
            self.lost += listener.add(steps, requests)

    @contextmanager
    def listen(self) -> Iterator["Listener"]:
        """News, until the block ends."""
        listener = Listener(self._capacity)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)


class Listener:
    """Has one reader. Where that is slow, the oldest steps and requests are lost."""

    def __init__(self, capacity: int) -> None:
        self._steps: deque[pb.EngineStats] = deque(maxlen=capacity)
        self._requests: deque[pb.RequestStats] = deque(maxlen=capacity)
        self._news = asyncio.Event()

    def add(self, steps: list[pb.EngineStats], requests: list[pb.RequestStats]) -> int:
        """Keep them for the reader; returns how many were lost for it."""
        held = len(self._steps) + len(self._requests)
        self._steps.extend(steps)
        self._requests.extend(requests)
        self._news.set()
        return held + len(steps) + len(requests) - len(self._steps) - len(self._requests)

    async def next(self) -> pb.StreamStepsResponse:
        """Whatever has come since the last time; waits for something."""
        await self._news.wait()
        self._news.clear()
        response = pb.StreamStepsResponse(steps=self._steps, requests=self._requests)
        self._steps.clear()
        self._requests.clear()
        return response
