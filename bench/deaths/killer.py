"""Kills services, each at a random moment."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

import msgspec

from sluice.launch import Ring

LOOK_SECONDS = 0.05


class Death(msgspec.Struct, frozen=True):
    """Of one service, by our hand."""

    service: str
    at: float
    """Seconds since the killer was made."""

    @property
    def role(self) -> str:
        """Such as "engine"."""
        return self.service.partition("-")[0]


class Killer:
    """Sends SIGKILL to one service after the other, at random, however the ring stands at that moment."""

    def __init__(self, ring: Ring, seed: int) -> None:
        self.deaths: list[Death] = []
        self._began = time.monotonic()
        self._ring = ring
        self._random = random.Random(seed)

    @property
    def killed(self) -> Counter[str]:
        """By role."""
        return Counter(death.role for death in self.deaths)

    async def run(self, kills: int, seconds: float) -> None:
        """So many, `seconds` apart on average, each role as often as the others."""
        for _ in range(kills):
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * seconds)
            await self._kill(self._random.choice(("router", "engine", "detok")))

    async def _kill(self, role: str) -> None:
        """One that is alive; where none of its role is, as soon as there is."""
        while not (alive := [c for c in self._ring.children.values() if c.role == role and c.alive]):
            await asyncio.sleep(LOOK_SECONDS)
        child = self._random.choice(alive)
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
            self.deaths.append(Death(child.name, round(time.monotonic() - self._began, 2)))
