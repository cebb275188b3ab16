"""Builds the engine around a runner."""

import time
from collections.abc import Callable
from hashlib import blake2b

import msgspec
from structlog.stdlib import BoundLogger

from engine_worker.core.engine import Engine
from engine_worker.core.intake import Intake, Terms
from engine_worker.core.live import LiveRequests
from engine_worker.core.stats import Stats
from engine_worker.hooks import Hooks
from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.kvcache.geometry import Geometry
from engine_worker.scheduling.build import build_scheduler
from engine_worker.scheduling.context import SchedulerContext
from engine_worker.step import Runner
from sluice.ring.checkpoint import Checkpoint
from sluice.settings.engine import Batching


def fingerprint(checkpoint: Checkpoint, weights: str, dtype: str, max_attention_window: tuple[int, ...]) -> str:
    """Identifies the model as this engine computes it, in hex: a stream may continue on an engine with the same one.

    Made of the checkpoint's files and the settings that change its function. Device, attention backend, number of ranks
    and batch sizes change no more than rounding and are left out, so a stream may move from a GPU to a CPU.
    """
    parts = (checkpoint.fingerprint, weights, dtype, max_attention_window)
    return blake2b(msgspec.msgpack.encode(parts), digest_size=8, person=b"sluice-model").hexdigest()


def longest_sequence(runner: Runner, batching: Batching, max_context: int) -> int:
    """Tokens of the longest sequence: `max_context` of the model, or what the runner's blocks hold if that is less."""
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
    """Raises ValueError on inconsistent batching limits, SchedulerLoadError on a user's scheduler that cannot be
    used."""
    cache = KvCacheManager(
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
    stats = Stats(cache, live, scheduler, context.preempted, terms.max_requests, micro_batches, time.time() - clock())
    return Engine(hooks, intake, live, scheduler, runner, cache, stats, clock, log)
