"""How one rank runs the model."""

from dataclasses import dataclass

from sluice.settings.engine import BatchSize, Compute, KvCacheSize


@dataclass(frozen=True)
class RunnerConfig(BatchSize, KvCacheSize, Compute):
    """The engine's settings that the runner needs, and the rank's place on its machine."""

    device_index: int = 0
    """Which of the GPUs."""
    ranks_here: int = 1
    """Processes on this machine that compute this model together, and share its cores and its memory."""
    weights_seed: int = 0
    """Of random weights."""
