"""The engine put together around a runner."""

from collections.abc import Callable
from dataclasses import dataclass

from structlog.stdlib import BoundLogger

from engine_worker.engine import Engine
from engine_worker.hooks import Hooks
from engine_worker.intake import Intake, Terms
from engine_worker.kvcache.cache import KvCache
from engine_worker.live import Live
from engine_worker.scheduling.capacity import MaxUtilization
from engine_worker.scheduling.micro_batch import InFlightBatching
from engine_worker.scheduling.simple import SimpleScheduler
from engine_worker.stats import Stats
from engine_worker.step import Runner


@dataclass(frozen=True, slots=True)
class Batching:
    """How requests share a step."""

    max_batch_size: int
    """Sequences in a step, and sequences that hold memory."""
    max_tokens_per_step: int
    chunked_context: bool = True
    block_reuse: bool = True


def assemble(
    runner: Runner,
    terms: Terms,
    batching: Batching,
    hooks: Hooks,
    clock: Callable[[], float],
    log: BoundLogger,
) -> Engine:
    """An engine with nothing to do yet. Raises ValueError on a batching that cannot work."""
    size, tokens = batching.max_batch_size, batching.max_tokens_per_step
    cache = KvCache(runner.num_blocks, runner.tokens_per_block, batching.block_reuse)
    scheduler = SimpleScheduler(
        cache, MaxUtilization(cache, size, tokens), InFlightBatching(size, tokens, batching.chunked_context)
    )
    live = Live(cache)
    intake = Intake(live, terms)
    stats = Stats(cache, live, terms.max_requests)
    return Engine(hooks, intake, live, scheduler, runner, cache, stats, clock, log)
