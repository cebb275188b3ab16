"""What the services of a ring hold, over time: resident bytes from Linux' /proc."""

import asyncio
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from sluice.launch import Ring

EVERY_SECONDS = 1.0
MEBIBYTE = 1 << 20


class Trail(msgspec.Struct, frozen=True):
    """One process, for as long as it lived."""

    service: str
    seconds: list[float]
    """Since the watch began."""
    mebibytes: list[float]

    @property
    def role(self) -> str:
        """Such as "engine"."""
        return self.service.partition("-")[0]

    def after(self, seconds: float) -> "Trail":
        """Without the first seconds of its life."""
        kept = [at - self.seconds[0] >= seconds for at in self.seconds]
        pairs = [pair for pair, keep in zip(zip(self.seconds, self.mebibytes, strict=True), kept, strict=True) if keep]
        return Trail(self.service, [at for at, _ in pairs], [size for _, size in pairs])


class Watch:
    """Looks at every process of a ring again and again, and knows a restarted one from the one before."""

    def __init__(self, ring: Ring) -> None:
        self.began = time.monotonic()
        self._ring = ring
        self._trails: dict[tuple[str, int], Trail] = {}

    @property
    def trails(self) -> list[Trail]:
        """By service, then in the order of their lives."""
        return sorted(self._trails.values(), key=lambda trail: (trail.service, trail.seconds[0]))

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(EVERY_SECONDS)

    def look(self) -> None:
        """Once."""
        at = round(time.monotonic() - self.began, 2)
        for name, pid in self._ring.pids.items():
            if size := resident_bytes(pid):
                trail = self._trails.setdefault((name, pid), Trail(name, [], []))
                trail.seconds.append(at)
                trail.mebibytes.append(round(size / MEBIBYTE, 2))


def resident_bytes(pid: int) -> int:
    """Of a process; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def before_and_after(trails: Iterable[Trail], until: float) -> dict[str, tuple[float, float]]:
    """By service, MiB: the last look before that time, and the last of all, which may be another process's."""
    found: dict[str, tuple[float, float]] = {}
    for trail in sorted(trails, key=lambda trail: trail.seconds[0]):
        early = [size for at, size in zip(trail.seconds, trail.mebibytes, strict=True) if at <= until]
        before = found.get(trail.service, (trail.mebibytes[0], 0.0))[0]
        found[trail.service] = (early[-1] if early else before, trail.mebibytes[-1])
    return found


def slope(trails: Sequence[Trail]) -> float | None:
    """MiB per minute by which processes grow as they live: least squares, each process with a level of its own.

    None where nobody was seen twice.
    """
    above = below = 0.0
    for trail in trails:
        at, size = np.array(trail.seconds), np.array(trail.mebibytes)
        if len(at) > 1:
            at = at - at.mean()
            above += float(at @ (size - size.mean()))
            below += float(at @ at)
    return 60 * above / below if below else None
