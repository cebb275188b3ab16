"""Time on a device."""

import time
from collections.abc import Callable

import torch


def wait(device: torch.device) -> None:
    """Until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fastest(device: torch.device, work: Callable[[], object], rounds: int, repeats: int) -> float:
    """Seconds of one `work`: the least of the rounds, each of so many of them."""
    work()
    found = []
    for _ in range(rounds):
        wait(device)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        wait(device)
        found.append((time.perf_counter() - began) / repeats)
    return min(found)
