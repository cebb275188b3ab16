"""Disturbances during a measurement, from Linux' /proc: time stolen by the host of a virtual machine, and CPU time of
foreign processes."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.harness.children import cpu_seconds


class Meanwhile(msgspec.Struct, frozen=True):
    """Use of the machine during a measurement. Shares are fractions of the time of all cores."""

    cores: int
    seconds: float = 0.0
    steal: float = 0.0
    """Share in which the host ran other work on these cores."""
    ours: float = 0.0
    """Share used by this process and its descendants."""
    foreign: float = 0.0
    """Share used by all other processes, including kernel threads."""


class MachineTimes(NamedTuple):
    """CPU seconds since the start of the machine; `ours` are those of this process and its descendants."""

    at: float
    busy: float
    steal: float
    ours: float

    @classmethod
    def read(cls) -> "MachineTimes":
        tick = os.sysconf("SC_CLK_TCK")
        line = Path("/proc/stat").read_text().partition("\n")[0]
        user, nice, system, _, _, irq, softirq, steal = (int(field) / tick for field in line.split()[1:9])
        ours = sum(_spent(pid) for pid in descendants(os.getpid()))
        return cls(time.monotonic(), user + nice + system + irq + softirq, steal, ours)

    def until(self, later: "MachineTimes") -> Meanwhile:
        cores = os.cpu_count() or 1
        seconds = later.at - self.at
        whole = max(seconds * cores, 1e-9)
        ours, busy = later.ours - self.ours, later.busy - self.busy
        foreign = max(0.0, busy - ours)
        return Meanwhile(cores, seconds, (later.steal - self.steal) / whole, ours / whole, foreign / whole)


def descendants(pid: int) -> list[int]:
    """The process itself and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                parent = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _spent(pid: int) -> float:
    """CPU seconds of a process. 0 if it has ended, since the time of its parent then includes them."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return cpu_seconds(pid, with_ended_children=True)
    return 0.0
