"""The constructor argument of schedulers, and helpers that they share."""

from collections import Counter, abc
from dataclasses import dataclass

from structlog.stdlib import BoundLogger

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import IN_ORDER, Sequence
from sluice.settings.engine import ChunkingPolicy

STEPS_BETWEEN_TRIES = 8
"""Steps after which a blocked sequence is tried again. While the holders stay the same it rarely begins to fit: only if
a prefix of it was cached or a window has advanced."""


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """The only constructor argument of all schedulers. Raises ValueError on inconsistent limits."""

    cache: KvCacheManager
    """Read-only for schedulers: `forecast`, `holders`, `tokens_per_block`."""
    max_batch_size: int
    """Limit on sequences in a step and on sequences that hold memory."""
    max_tokens_per_step: int
    chunked_context: bool = True
    """Whether a context may be computed over several steps."""
    context_chunking_policy: ChunkingPolicy = "first_come_first_served"

    def __post_init__(self) -> None:
        size, tokens = self.max_batch_size, self.max_tokens_per_step
        if not 1 <= size <= tokens:
            raise ValueError(f"max_batch_size must be from 1 to max_tokens_per_step (got {size} and {tokens})")


class Holders:
    """Caches, until the holders of memory change, their order and whether the first waiting sequence fits in
    addition."""

    def __init__(self, cache: KvCacheManager) -> None:
        self._cache = cache
        self._sorted: list[Sequence] = []
        self._blocked: Sequence | None = None
        self._steps_left = 0

    def in_order(self) -> list[Sequence]:
        """A new list."""
        holders = self._cache.holders
        # The set is the same if its size is, and all previous holders still are holders.
        if len(holders) != len(self._sorted) or not all(map(holders.__contains__, self._sorted)):
            self._sorted = sorted(holders, key=IN_ORDER)
            self._blocked = None
        return self._sorted.copy()

    def record_blocked(self, sequence: Sequence) -> None:
        """Record that the first waiting sequence does not fit in addition to the holders of the last `in_order`."""
        # Not while ended sequences still hold blocks: the sequence may fit once these are released.
        if not self._cache.retired:
            self._blocked, self._steps_left = sequence, STEPS_BETWEEN_TRIES

    def is_head_blocked(self, active: abc.Sequence[Sequence]) -> bool:
        """Whether to skip admission in this step: the first waiting sequence would not fit. Some sequence of `active`
        must be waiting."""
        if self._blocked is None or self._steps_left < 1:
            return False
        self._steps_left -= 1
        return self._blocked is next(sequence for sequence in active if not sequence.blocks)


class SchedulerWarnings:
    """Logs errors of custom schedulers: the first, second, fourth, eighth, … time of each kind."""

    def __init__(self, name: str, log: BoundLogger) -> None:
        self._counts: Counter[str] = Counter()
        self._name = name
        self._log = log

    def on_exception(self) -> None:
        """Log the current exception; call it in an except block."""
        self._warn("scheduler_raised", exc_info=True)

    def on_faults(self, faults: Counter[str]) -> None:
        """Log the faults of an answer. `faults`: numbers by kind, may be empty."""
        if faults:
            self._warn("scheduler_answer_corrected", faults=dict(faults))

    def on_idle(self, active: int, holders: int) -> None:
        """Log that nothing was scheduled, although `active` sequences are live and `holders` of them hold memory."""
        self._warn("nothing_scheduled", active=active, holders=holders)

    def _warn(self, event: str, **details: object) -> None:
        self._counts[event] += 1
        times = self._counts[event]
        if times & (times - 1) == 0:
            self._log.error(event, scheduler=self._name, times=times, **details)
