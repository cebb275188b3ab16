"""When a device had nothing to do, by torch's profiler."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu.findings import Skip
from bench.gpu.timing import wait

SHORTEST = 5e-6
"""Seconds: less than that is what lies between two kernels of the same graph while the profiler looks on."""


class Idle(NamedTuple):
    """Seconds between the first and the last thing that a device did."""

    total: float
    longest: float


def idle(device: torch.device, work: Callable[[], object]) -> Idle:
    """Profile it. Raises Skip where the profiler sees nothing."""
    cuda = device.type == "cuda"
    watched = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    # A CPU's operations run in a thread of the runner's.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[watched], experimental_config=None if cuda else threads) as profiler:
        work()
        wait(device)
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    events = profiler.profiler.kineto_results.events()
    spans = [(event.start_ns(), event.end_ns()) for event in events if event.device_type() == kind]
    if not spans:
        raise Skip("torch's profiler saw nothing on the device")
    return between(spans)


def between(spans: Iterable[tuple[int, int]]) -> Idle:
    """Of spans in nanoseconds, in any order: the stretches that none of them covers."""
    total = longest = 0.0
    reached: int | None = None
    for start, end in sorted(spans):
        gap = 0.0 if reached is None else (start - reached) * 1e-9
        if gap >= SHORTEST:
            total, longest = total + gap, max(longest, gap)
        reached = end if reached is None else max(reached, end)
    return Idle(total, longest)
