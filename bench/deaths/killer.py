"""Kills services, each at a random moment."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

from sluice.launch import Ring

LOOK_SECONDS = 0.05


class Killer:
    """Sends SIGKILL to one service after the other, at random, however the ring stands at that moment."""

    def __init__(self, ring: Ring, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        """By role."""
        self.times: list[float] = []
        """On the monotonic clock."""
        self._ring = ring
        self._random = random.Random(seed)

    async def run(self, kills: int, seconds: float) -> None:
        """So many, `seconds` apart on average, each role as often as the others."""
        for _ in range(kills):
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * seconds)
            await self._kill(self._random.choice(("router", "engine", "detok")))

    async def _kill(self, role: str) -> None:
        """One that is alive; where none of its role is, as soon as there is."""
        while not (alive := [c for c in self._ring.children.values() if c.role == role and c.alive]):
            await asyncio.sleep(LOOK_SECONDS)
        with suppress(ProcessLookupError):
            os.kill(self._random.choice(alive).pid, signal.SIGKILL)
            self.killed[role] += 1
            self.times.append(time.monotonic())
