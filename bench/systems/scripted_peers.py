"""An engine and a detokenizer that compute nothing: python -m bench.systems.scripted_peers ENGINE DETOKENIZER SECONDS.

They answer every request with `max_tokens` rows of `stream_interval` tokens: one row per request and step, and a step
takes SECONDS per row. So a router can be measured alone, at a known token rate.
"""

import secrets
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import zmq

from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import Lane
from sluice.wire.errors import FinishReason
from sluice.wire.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Hello
from sluice.wire.requests import Cancel, Submit, ToDetokenizer, ToEngine
from sluice.wire.rows import End, Started, TextBatch, Times
from sluice.wire.stats import StepStats
from sluice.wire.timing import HEARTBEAT_SECONDS

MOST_REQUESTS = 4096
LEAST_STEP_SECONDS = 0.002
TEXT = " word"
"""Text of each token."""
TOKEN = 300


@dataclass(eq=False)
class _Stream:
    submit: Submit
    computed: int = 0
    """Tokens so far."""
    sent: int = 0
    """Tokens sent to the router."""
    started: bool = False

    @property
    def tokens(self) -> int:
        """Total number of tokens: `max_tokens` rows."""
        return self.submit.stopping.max_tokens * self.submit.text.interval


class ScriptedPeers:
    """Both services in one thread."""

    def __init__(self, engine: str, detokenizer: str, row_seconds: float) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        engine_messages: Any = ToEngine
        detokenizer_messages: Any = ToDetokenizer
        self._engine: Inbox[Any] = Inbox(self._context, engine, engine_messages, capacity=4096)
        self._detokenizer: Inbox[Any] = Inbox(self._context, detokenizer, detokenizer_messages)
        self._epochs = secrets.randbits(62), secrets.randbits(62)
        self._row_seconds = row_seconds
        self._lanes: dict[str, Lane] = {}
        self._engine_hellos: dict[str, Hello] = {}
        self._detokenizer_hellos: dict[str, Hello] = {}
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._beat_at = 0.0

    def run(self) -> None:
        """Runs until the process is killed."""
        while True:
            self._receive()
            running = list(self._streams.values())
            ends = time.monotonic() + max(LEAST_STEP_SECONDS, len(running) * self._row_seconds)
            while (left := ends - time.monotonic()) > 0:
                self._send_heartbeats()
                self._engine.wait(left)
                self._receive()
            self._step(running)

    def _receive(self) -> None:
        for message in self._detokenizer.receive():
            if isinstance(message, Hello):
                self._detokenizer_hellos[message.address] = message
        for message in self._engine.receive():
            if isinstance(message, Hello):
                self._engine_hellos[message.address] = message
            elif isinstance(message, Submit):
                self._streams[message.request, message.attempt] = _Stream(message)
            elif isinstance(message, Cancel):
                self._streams.pop((message.request, message.attempt), None)

    def _step(self, running: Iterable[_Stream]) -> None:
        by_router: dict[str, list[_Stream]] = {}
        for stream in running:
            stream.computed = min(stream.computed + stream.submit.text.interval, stream.tokens)
            by_router.setdefault(stream.submit.router, []).append(stream)
        for router, streams in by_router.items():
            # If the lane is full, the next batch includes these tokens too.
            if self._lane(router).send(_batch(streams)):
                self._mark_sent(streams)

    def _mark_sent(self, streams: Iterable[_Stream]) -> None:
        for stream in streams:
            stream.started, stream.sent = True, stream.computed
            if stream.sent == stream.tokens:
                self._streams.pop((stream.submit.request, stream.submit.attempt), None)

    def _send_heartbeats(self) -> None:
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + HEARTBEAT_SECONDS
        stats = StepStats(max_requests=MOST_REQUESTS, tokens_per_kv_block=32, max_kv_blocks=1 << 20)
        here = "engine", self._epochs[0], self._engine.address
        for router, hello in self._engine_hellos.items():
            engine = EngineHeartbeat(*here, "scripted", 1 << 16, False, stats, challenge=hello.challenge)
            self._lane(router).send(engine)
        here = "detok", self._epochs[1], self._detokenizer.address
        for router, hello in self._detokenizer_hellos.items():
            self._lane(router).send(DetokenizerHeartbeat(*here, False, 0, 0, 0.0, challenge=hello.challenge))

    def _lane(self, address: str) -> Lane:
        if address not in self._lanes:
            self._lanes[address] = Lane(self._context, address)
        return self._lanes[address]


def _batch(streams: list[_Stream]) -> TextBatch:
    counts = [stream.computed - stream.sent for stream in streams]
    last = End(FinishReason.LENGTH, Times(0.0, 0.0, 0.0))
    return TextBatch(
        "detok",
        [
            Started(stream.submit.request, stream.submit.attempt, len(stream.submit.prompt), 0)
            for stream in streams
            if not stream.started
        ],
        request=[stream.submit.request for stream in streams],
        attempt=[stream.submit.attempt for stream in streams],
        sequence=[0] * len(streams),
        offset=[stream.sent for stream in streams],
        count=counts,
        tokens=[TOKEN] * sum(counts),
        logprobs={},
        ends={i: last for i, stream in enumerate(streams) if stream.computed == stream.tokens},
        text=[TEXT * count for count in counts],
    )


if __name__ == "__main__":
    ScriptedPeers(sys.argv[1], sys.argv[2], float(sys.argv[3])).run()
