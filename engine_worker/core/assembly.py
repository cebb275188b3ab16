"""The engine put together around a runner."""

import time
from collections.abc import Callable

from structlog.stdlib import BoundLogger

from engine_worker.core.engine import Engine
from engine_worker.core.intake import Intake, Terms
from engine_worker.core.live import LiveRequests
from engine_worker.core.stats import Stats
from engine_worker.hooks import Hooks
from engine_worker.kvcache.cache import KvCache
from engine_worker.kvcache.geometry import Geometry
from engine_worker.scheduling.build import build_scheduler
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.step import Runner
from sluice.settings.engine import Batching


def longest_sequence(runner: Runner, batching: Batching, max_context: int) -> int:
    """Tokens of the longest sequence that the runner's blocks hold, of a model with so long a context."""
    geometry = Geometry.fit(runner.num_blocks, runner.tokens_per_block, runner.window, batching.chunk)
    longest = geometry.longest(runner.num_blocks)
    return max_context if longest is None else min(max_context, longest)


def assemble(
    runner: Runner,
    terms: Terms,
    batching: Batching,
    hooks: Hooks,
    clock: Callable[[], float],
    log: BoundLogger,
) -> Engine:
    """An engine with nothing to do yet. Raises ValueError on a batching that cannot work."""
    cache = KvCache(
        runner.num_blocks,
        runner.tokens_per_block,
        batching.block_reuse,
        num_host_blocks=runner.num_host_blocks,
        window=runner.window,
        chunk=batching.chunk,
        clock=clock,
    )
    context = SchedulerContext(
        cache,
        batching.max_batch_size,
        batching.max_tokens_per_step,
        batching.chunked_context,
        batching.context_chunking_policy,
    )
    scheduler = build_scheduler(batching, context, log)
    live = LiveRequests(cache)
    intake = Intake(live, terms, batching.priority_aging_seconds)
    micro_batches = 2 if runner.overlap else 1
    stats = Stats(cache, live, scheduler, context.pauses, terms.max_requests, micro_batches, time.time() - clock())
    return Engine(hooks, intake, live, scheduler, runner, cache, stats, clock, log)
