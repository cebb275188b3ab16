"""Streams of every kind through a ring that is disturbed, each compared with the same stream undisturbed."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.deaths.requests import PROMPTS, StreamRequest
from bench.deaths.streams import StreamSeen, StreamsPlan, connect, undisturbed, without_pause
from tests.system.hosts.ring import Ring

LONG = {"max_tokens": 600, "ignore_eos": True, "token_ids": True}
REQUESTS: Sequence[StreamRequest] = (
    *StreamsPlan(streams=6, max_tokens=80).requests,
    StreamRequest("long, greedy", PROMPTS[0], {**LONG, "temperature": 0.0, "seed": 1}),
    StreamRequest("long, seeded", PROMPTS[1], {**LONG, "temperature": 1.0, "seed": 2}),
)
BEFORE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 10.0
SHOWN_FAULTS = 3


@dataclass
class Outcome:
    """The streams of one scenario."""

    name: str
    streams: int = 0
    failed: int = 0
    changed: int = 0
    """Streams that did not fail but differ from the undisturbed ones."""
    moves: int = 0
    """Streams that took more than one attempt or that were resumed at another router."""
    pause: float = 0.0
    """The longest wait of any stream for its first or its next chunk, in seconds."""
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    broken: str = ""
    """Why the scenario could not be completed; empty if it was."""

    @property
    def good(self) -> bool:
        return not (self.broken or self.failed or self.changed) and self.pause <= MAX_PAUSE_SECONDS

    @property
    def text(self) -> str:
        counts = f"{self.streams} streams, {self.failed} failed, {self.changed} changed, {self.moves} moves"
        times = f"longest pause {self.pause:.1f} s, in {self.seconds:.0f} s"
        return "\n    ".join([f"{self.name}: {counts}, {times}", *filter(None, [self.broken, *self.faults])])

    def add(self, stream: StreamSeen, expected: StreamSeen) -> None:
        difference = stream.difference(expected)
        self.streams += 1
        self.failed += bool(stream.faults)
        self.changed += bool(difference) and not stream.faults
        self.moves += bool(stream.resumed)
        self.pause = max(self.pause, stream.first_token, stream.stall)
        if difference and len(self.faults) < SHOWN_FAULTS:
            self.faults.append(difference)


def run_undisturbed(ring: Ring) -> list[StreamSeen]:
    """The undisturbed streams. Raises RuntimeError if one of them fails."""

    async def run() -> list[StreamSeen]:
        async with connect(ring.addresses) as client:
            return await undisturbed(client, REQUESTS, lambda: None)

    return asyncio.run(run())


def run_disturbed(ring: Ring, name: str, scenario: Callable[[Ring], None], expected: Sequence[StreamSeen]) -> Outcome:
    """Run all streams repeatedly until the scenario has ended, and those that are then running to their end."""
    outcome, began, moved = Outcome(name), time.monotonic(), ring.moved

    async def disturb() -> None:
        await asyncio.sleep(BEFORE_SECONDS)
        try:
            await asyncio.to_thread(scenario, ring)
        except (OSError, RuntimeError) as error:
            outcome.broken = f"{type(error).__name__}: {error}"

    async def run() -> None:
        async with connect(ring.addresses) as client:
            await without_pause(client, REQUESTS, expected, asyncio.create_task(disturb()), outcome.add)

    asyncio.run(run())
    outcome.moves += ring.moved - moved
    outcome.seconds = time.monotonic() - began
    return outcome
