"""Streams of every kind through a ring while something happens to it, each compared with its undisturbed self."""

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
    """What became of the streams of one scenario."""

    name: str
    streams: int = 0
    failed: int = 0
    changed: int = 0
    """Differ from their undisturbed selves, failed ones aside."""
    moves: int = 0
    """Streams that took more than one attempt, and those that went on at another router."""
    pause: float = 0.0
    """The longest that a stream waited for its first chunk or its next one, in seconds."""
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    broken: str = ""
    """Why the scenario did not come to its end."""

    @property
    def good(self) -> bool:
        return not (self.broken or self.failed or self.changed) and self.pause <= MAX_PAUSE_SECONDS

    @property
    def text(self) -> str:
        counts = f"{self.streams} streams, {self.failed} failed, {self.changed} changed, {self.moves} moves"
        times = f"longest pause {self.pause:.1f} s, in {self.seconds:.0f} s"
        return "\n    ".join([f"{self.name}: {counts}, {times}", *filter(None, [self.broken, *self.faults])])

    def add(self, found: StreamSeen, truth: StreamSeen) -> None:
        difference = found.difference(truth)
        self.streams += 1
        self.failed += bool(found.faults)
        self.changed += bool(difference) and not found.faults
        self.moves += bool(found.resumed)
        self.pause = max(self.pause, found.first_token, found.stall)
        if difference and len(self.faults) < SHOWN_FAULTS:
            self.faults.append(difference)


def run_undisturbed(ring: Ring) -> list[StreamSeen]:
    """What the streams are. Raises RuntimeError if one fails by itself."""

    async def run() -> list[StreamSeen]:
        async with connect(ring.addresses) as client:
            return await undisturbed(client, REQUESTS, lambda: None)

    return asyncio.run(run())


def run_disturbed(ring: Ring, name: str, scenario: Callable[[Ring], None], truths: Sequence[StreamSeen]) -> Outcome:
    """All streams, again and again until the scenario has ended, and those of that moment to their ends."""
    outcome, began, moved = Outcome(name), time.monotonic(), ring.moved

    async def disturb() -> None:
        await asyncio.sleep(BEFORE_SECONDS)
        try:
            await asyncio.to_thread(scenario, ring)
        except (OSError, RuntimeError) as error:
            outcome.broken = f"{type(error).__name__}: {error}"

    async def run() -> None:
        async with connect(ring.addresses) as client:
            await without_pause(client, REQUESTS, truths, asyncio.create_task(disturb()), outcome.add)

    asyncio.run(run())
    outcome.moves += ring.moved - moved
    outcome.seconds = time.monotonic() - began
    return outcome
