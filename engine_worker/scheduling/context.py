"""What every scheduler is built with."""

from collections import Counter
from dataclasses import dataclass

from structlog.stdlib import BoundLogger

from engine_worker.kvcache.cache import KvCacheManager
from sluice.settings.engine import ChunkingPolicy


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """The one constructor argument of every scheduler. Raises ValueError on inconsistent limits."""

    cache: KvCacheManager
    """For questions (`forecast`, `holders`, `tokens_per_block`); schedulers must not move its blocks."""
    max_batch_size: int
    """Limit on sequences in a step and on sequences that hold memory."""
    max_tokens_per_step: int
    chunked_context: bool = True
    """Whether a context may be computed over several steps."""
    context_chunking_policy: ChunkingPolicy = "first_come_first_served"

    def __post_init__(self) -> None:
        size, tokens = self.max_batch_size, self.max_tokens_per_step
        # If a full batch of generation took all tokens of a step, a context of another beam width would starve.
        if not 1 <= size <= tokens:
            raise ValueError(f"max_batch_size must be from 1 to max_tokens_per_step, got {size} and {tokens}")


class SchedulerWarnings:
    """Logs what a user's scheduler does wrong: the first, second, fourth, eighth … time for each kind."""

    def __init__(self, name: str, log: BoundLogger) -> None:
        self._counts: Counter[str] = Counter()
        self._name = name
        self._log = log

    def on_exception(self) -> None:
        """To be called from an except block."""
        self._warn("scheduler_raised", exc_info=True)

    def on_faults(self, faults: Counter[str]) -> None:
        """What was wrong with an answer, by count; may be empty."""
        if faults:
            self._warn("scheduler_answer_corrected", faults=dict(faults))

    def on_idle(self, active: int, holders: int) -> None:
        """Nothing was scheduled, although `active` sequences are live and `holders` of them hold memory."""
        self._warn("nothing_scheduled", active=active, holders=holders)

    def _warn(self, event: str, **details: object) -> None:
        self._counts[event] += 1
        times = self._counts[event]
        if times & (times - 1) == 0:
            self._log.error(event, scheduler=self._name, times=times, **details)
