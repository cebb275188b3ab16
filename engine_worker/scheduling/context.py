"""What every scheduler is made with."""

from dataclasses import dataclass, field

from engine_worker.kvcache.cache import KvCache
from engine_worker.scheduling.preempted import Preempted
from sluice.settings.engine import ChunkingPolicy


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """The one argument of a scheduler's class. Raises ValueError on a batching that cannot work."""

    cache: KvCache
    """To be asked (`forecast`, `holders`, `tokens_per_block`); its blocks are not a scheduler's to move."""
    max_batch_size: int
    """Sequences in a step, and sequences that hold memory, at most."""
    max_tokens_per_step: int
    chunked_context: bool = True
    """Whether a context may be computed in several steps."""
    context_chunking_policy: ChunkingPolicy = "first_come_first_served"
    pauses: Preempted = field(default_factory=Preempted)
    """`RequestScheduler.pause` notes them here."""

    def __post_init__(self) -> None:
        size, tokens = self.max_batch_size, self.max_tokens_per_step
        # A full batch of generation that took all tokens would starve a context of another beam width for ever.
        if not 1 <= size <= tokens:
            raise ValueError(f"max_batch_size must be from 1 to max_tokens_per_step, got {size} and {tokens}")
