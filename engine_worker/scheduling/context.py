"""What schedulers are built with and share."""

from collections import Counter, abc
from dataclasses import dataclass

from structlog.stdlib import BoundLogger

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.sequence import IN_ORDER, Sequence
from sluice.settings.engine import ChunkingPolicy

STEPS_BETWEEN_TRIES = 8
"""As long as the holders stay the same a blocked sequence seldom begins to fit: only if a prefix of it was cached or a
window moved on."""


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
        if not 1 <= size <= tokens:
            raise ValueError(f"max_batch_size must be from 1 to max_tokens_per_step, got {size} and {tokens}")


class Holders:
    """The holders of memory in order, and whether the first waiting sequence is known not to fit beside them.

    Both are remembered until the holders change.
    """

    def __init__(self, cache: KvCacheManager) -> None:
        self._cache = cache
        self._sorted: list[Sequence] = []
        self._blocked: Sequence | None = None
        self._steps_left = 0

    def in_order(self) -> list[Sequence]:
        """A new list."""
        holders = self._cache.holders
        # Same size and every previous holder still is one: the same set.
        if len(holders) != len(self._sorted) or not all(map(holders.__contains__, self._sorted)):
            self._sorted = sorted(holders, key=IN_ORDER)
            self._blocked = None
        return self._sorted.copy()

    def record_blocked(self, sequence: Sequence) -> None:
        """This, the first waiting sequence, does not fit beside the holders of the last `in_order`."""
        # Not while an in-flight step is about to give blocks back: then it may fit in the next step.
        if not self._cache.retired:
            self._blocked, self._steps_left = sequence, STEPS_BETWEEN_TRIES

    def is_head_blocked(self, active: abc.Sequence[Sequence]) -> bool:
        """Whether to skip the try in this step. Some of `active` must be waiting."""
        if self._blocked is None or self._steps_left < 1:
            return False
        self._steps_left -= 1
        return self._blocked is next(sequence for sequence in active if not sequence.blocks)


class SchedulerWarnings:
    """Logs what a user's scheduler does wrong: the first, second, fourth, eighth … time for each kind."""

    def __init__(self, name: str, log: BoundLogger) -> None:
        self._counts: Counter[str] = Counter()
        self._name = name
        self._log = log

    def on_exception(self) -> None:
        """Call it in an except block."""
        self._warn("scheduler_raised", exc_info=True)

    def on_faults(self, faults: Counter[str]) -> None:
        """What was wrong with an answer, by number; may be empty."""
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
