"""`python -m engine_worker`: one engine process."""

import gc
import os
import time
from collections.abc import Callable

import zmq
from structlog.stdlib import BoundLogger

from engine_worker.config import EngineSettings, read_settings
from engine_worker.step import Runner
from engine_worker.worker import Worker
from sluice.ring.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from sluice.ring.process import die_with_parent, on_stop_signal
from sluice.telemetry import configure

PROGRESS_SECONDS = 0.1
"""Between two lines about loading."""


def main() -> None:
    """Load, serve until SIGTERM or SIGINT, drain. Exit status 0 after a drain, 1 when it cannot start."""
    die_with_parent()
    settings = read_settings()
    log = configure("engine_worker", settings.log_level, exception_texts=True).bind(id=settings.id)
    try:
        settings.schedulers.find()
        settings.security("engine").check(settings.listen)
        checkpoint = open_checkpoint(settings.model, settings.name)
        runner = load(settings, checkpoint, log)
    except (CheckpointError, ValueError) as error:
        raise SystemExit(f"python -m engine_worker: {error}") from error
    try:
        worker = Worker(settings, checkpoint, runner, log)
    except zmq.ZMQError as error:
        raise SystemExit(f"python -m engine_worker: cannot listen on {settings.listen}: {error}") from error
    except (OSError, ValueError) as error:
        raise SystemExit(f"python -m engine_worker: {error}") from error
    # What was loaded lives as long as the process: the collector need not look at it again in the middle of a step.
    gc.collect()
    gc.freeze()
    on_stop_signal(worker.stop)
    log.info("ready", address=worker.address, model=checkpoint.name, **runner.choices, **worker.sizes())
    worker.serve()


def load(settings: EngineSettings, checkpoint: Checkpoint, log: BoundLogger) -> Runner:
    """The model, in memory. Raises CheckpointError and ValueError, see `load_runner`."""
    # Where cores are shared, a thread that spins at a barrier takes the core from the one it waits for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Torch takes seconds to import: wrong settings are told before that.
    from engine_worker.runner.config import RunnerConfig
    from engine_worker.runner.load import load_runner

    config = RunnerConfig(
        device=settings.device,
        dtype=settings.dtype,
        attention=settings.attention,
        weights=settings.weights,
        tokens_per_block=settings.tokens_per_block,
        kv_cache_tokens=settings.kv_cache_tokens,
        kv_memory_fraction=settings.memory_fraction,
        kv_host_memory=settings.kv_host_memory,
        max_batch_size=settings.max_batch_size,
        max_tokens_per_step=settings.max_tokens_per_step,
        max_attention_window=settings.max_attention_window,
        overlap=settings.overlap,
        threads=settings.step_threads,
    )
    return load_runner(checkpoint, config, progress_log(log))


def progress_log(log: BoundLogger, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """A callback for (bytes done, bytes in all) that logs the first, the last, and now and then one between them."""
    next_at = clock()

    def progress(done: int, total: int) -> None:
        nonlocal next_at
        if clock() >= next_at or done >= total:
            next_at = clock() + PROGRESS_SECONDS
            log.info("loading", done=done, total=total)

    return progress


if __name__ == "__main__":
    main()
