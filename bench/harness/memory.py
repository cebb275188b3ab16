"""Resident memory of a ring's services over time, from Linux' /proc."""

import asyncio
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from sluice.launch import Ring

EVERY_SECONDS = 1.0
MEBIBYTE = 1 << 20


class Trail(msgspec.Struct, frozen=True):
    """Memory of one process over time."""

    service: str
    """Such as "engine-0"; a restarted process of the service has a separate trail."""
    seconds: list[float]
    """Times of the samples, since the watch began."""
    mebibytes: list[float]
    """Resident memory at these times."""

    @property
    def role(self) -> str:
        return self.service.partition("-")[0]

    def after(self, seconds: float) -> "Trail":
        """Without the first `seconds` of the process."""
        first = bisect_left(self.seconds, self.seconds[0] + seconds)
        return Trail(self.service, self.seconds[first:], self.mebibytes[first:])


class MemoryWatch:
    """Samples every process of a ring; a restarted service begins a new trail."""

    def __init__(self, ring: "Ring") -> None:
        self.began = time.monotonic()
        self._ring = ring
        self._trails: dict[tuple[str, int], Trail] = {}

    @property
    def trails(self) -> list[Trail]:
        return sorted(self._trails.values(), key=lambda trail: (trail.service, trail.seconds[0]))

    async def run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(EVERY_SECONDS)

    def sample(self) -> None:
        at = round(time.monotonic() - self.began, 2)
        for name, pid in self._ring.pids.items():
            if size := resident_bytes(pid):
                trail = self._trails.setdefault((name, pid), Trail(name, [], []))
                trail.seconds.append(at)
                trail.mebibytes.append(round(size / MEBIBYTE, 2))


def resident_bytes(pid: int) -> int:
    """Resident memory; 0 if the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def before_and_after(trails: Iterable[Trail], until: float) -> dict[str, tuple[float, float]]:
    """MiB by service: its last sample before `until` and its last sample of all, which may be from a later process."""
    found: dict[str, tuple[float, float]] = {}
    for trail in sorted(trails, key=lambda trail: trail.seconds[0]):
        early = [size for at, size in zip(trail.seconds, trail.mebibytes, strict=True) if at <= until]
        before = found.get(trail.service, (trail.mebibytes[0], 0.0))[0]
        found[trail.service] = (early[-1] if early else before, trail.mebibytes[-1])
    return found


def slope(trails: Sequence[Trail]) -> float | None:
    """Growth in MiB per minute by least squares, with one offset per process. None if no process has two samples."""
    above = below = 0.0
    for trail in trails:
        at, size = np.array(trail.seconds), np.array(trail.mebibytes)
        if len(at) > 1:
            at = at - at.mean()
            above += float(at @ (size - size.mean()))
            below += float(at @ at)
    return 60 * above / below if below else None
