"""A group of ranks whose processes, graphs and collective operations are fake."""

import time

from engine_worker.layers.shard import Shard
from engine_worker.runner.config import RunnerConfig
from tests.fakes.command_sender import CommandSender
from tests.fakes.graphs import WeakCapture

CONFIG = RunnerConfig("cpu", tokens_per_block=4, kv_cache_tokens=64, max_batch_size=2, overlap=True)


def ignore(_done: int, _total: int) -> None:
    """Drop a progress report."""


class FakeProcesses:
    """Ranks that complete every command immediately; records how they were ended."""

    def __init__(self, size: int, _seconds: float, log_level: str) -> None:
        self.sender = CommandSender(size)
        self.sender.keeps_up = True
        self.log_level = log_level
        self.patience: float | None = None
        """Time limit in seconds for which `end` was called."""
        self.killed = False

    def exit_reason(self, _rank: int) -> None:
        return None

    def end(self, seconds: float) -> None:
        self.patience = seconds

    def kill(self) -> None:
        self.killed = True


class FakeGroup(Shard):
    """A group of one rank. Closing it waits for the graphs, as NCCL does."""

    def __init__(self, capture: WeakCapture) -> None:
        self.capture = capture
        self.barrier_reached = False
        self.closed = False

    def barrier(self) -> None:
        self.barrier_reached = True

    def close(self) -> None:
        while self.capture.alive:
            time.sleep(0.01)
        self.closed = True
