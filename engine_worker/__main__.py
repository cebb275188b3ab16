"""`python -m engine_worker`: one engine process."""

from sluice.host.installation import require_extra
from sluice.host.process import exit_on_signals

if __name__ == "__main__":
    # Before the imports below, which take about a second.
    exit_on_signals()
    require_extra("engine_worker", "engine")

import gc
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from structlog.stdlib import BoundLogger

from engine_worker.parallel.channel import ChannelError
from engine_worker.parallel.rank_env import RankEnv, read_rank_env
from engine_worker.protocol import Runner
from engine_worker.ringside import tensor_outbox
from engine_worker.ringside.heartbeats import MAX_ROUTERS
from engine_worker.ringside.identity import why_context_is_limited
from engine_worker.ringside.outbox import MAX_LANES
from engine_worker.ringside.worker import Worker, open_metrics_port
from engine_worker.scheduling.build import find_classes
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import Checkpoint, fetch_weights, open_checkpoint
from sluice.host.descriptors import (
    LANE_DESCRIPTORS,
    OWN_DESCRIPTORS,
    WATCHED_LANE_DESCRIPTORS,
    check_limit,
    raise_limit,
)
from sluice.host.output import protect_stderr
from sluice.host.ports import PortError, check_ports
from sluice.host.process import die_with_parent, on_stop_signal, run_service
from sluice.settings.engine import ProcessorNames
from sluice.settings.fields import section_of
from sluice.settings.read import changed_settings, load_settings
from sluice.settings.services import EngineSettings
from sluice.telemetry.logs import configure
from sluice.telemetry.probes import Startup
from sluice.telemetry.server import MAX_CONNECTIONS, MetricsPort

if TYPE_CHECKING:
    from engine_worker.kvcache.keepers import Keepers
    from engine_worker.pool_files.folder import PoolFolder
    from engine_worker.runner.config import RunnerConfig

PREFILL_NICENESS = 10
NEEDED_DESCRIPTORS = (
    OWN_DESCRIPTORS
    + MAX_CONNECTIONS
    + (MAX_LANES + tensor_outbox.MAX_LANES) * LANE_DESCRIPTORS
    + MAX_ROUTERS * WATCHED_LANE_DESCRIPTORS
)
PROGRESS_SECONDS = 0.1
"""Interval between two log events of progress."""


def main() -> None:
    """Load the model, serve until SIGTERM or SIGINT, then drain. Exit status 0 after a drain, 1 if it cannot start."""
    protect_stderr()
    die_with_parent()
    settings = load_settings(EngineSettings)
    log = configure("engine_worker", settings.log_level, exception_texts=True).bind(id=settings.id)
    check_limit(raise_limit(), NEEDED_DESCRIPTORS, log)
    with ExitStack() as stack:
        try:
            rank_env = read_rank_env(settings.tensor_parallel, os.environ)
            if rank_env.rank:
                # Started by torchrun: only rank 0 serves. `follow` does not return.
                from engine_worker.parallel.follower import follow

                follow(rank_env, settings.rank_start_timeout, log)
            check_ports(settings.ports)
            find_classes(settings)
            settings.security.check(settings.listen)
            # Before the model is loaded, so that probes and metrics show the progress.
            metrics_port = open_metrics_port(settings)
            if settings.phase == "prefill":
                # On shared cores: the steps of a decode engine are short, and its streams wait for each of them. Before
                # other threads start, which inherit it.
                os.nice(PREFILL_NICENESS)
            # Without the weights, whose download may take long, until it is clear that the model can be served.
            checkpoint = open_checkpoint(settings.model, settings.name, revision=settings.revision, weights=False)
            checkpoint, runner = load(settings, rank_env, checkpoint, metrics_port.startup, log, stack)
        except (CheckpointError, PortError, ValueError, ChannelError) as error:
            raise SystemExit(str(error)) from error
        serve(settings, checkpoint, runner, log, metrics_port)


def serve(
    settings: EngineSettings, checkpoint: Checkpoint, runner: Runner, log: BoundLogger, metrics_port: MetricsPort
) -> None:
    """Serve until a signal arrives and the engine has drained. Raises SystemExit if it cannot listen."""
    try:
        worker = Worker(settings, checkpoint, runner, log, metrics_port, find_keepers(settings, runner))
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    # Objects created so far live as long as the process: exclude them from garbage collection, which interrupts steps.
    gc.collect()
    gc.freeze()
    on_stop_signal(worker.stop)
    if (reason := why_context_is_limited(settings, checkpoint, worker.limits)) is not None:
        log.warning("context_limited", reason=reason)
    limits = runner.choices | worker.sizes()
    log.info("ready", address=worker.address, model=checkpoint.name, **limits, settings=changed_settings(settings))
    worker.serve()


def load(
    settings: EngineSettings,
    rank_env: RankEnv,
    checkpoint: Checkpoint,
    startup: Startup,
    log: BoundLogger,
    stack: ExitStack,
) -> tuple[Checkpoint, Runner]:
    """The checkpoint with its weights, and the runner. `stack` gets callbacks that end the other ranks and the
    processes of guided decoding. Raises as `with_weights` and `load_runner`, and ChannelError if a rank does not
    connect."""
    # If cores are shared, a thread that spins at a barrier takes the core from the thread it waits for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Imported here because torch takes seconds to import: invalid settings are reported before that.
    # Garbage collections would take a sixth of that time, because imports create many objects.
    gc.disable()
    from engine_worker.backend import load_runner
    from engine_worker.guided.guides import Guides, why_unavailable
    from engine_worker.guided.processes import GuideModel
    from engine_worker.runner.config import DraftConfig, RunnerConfig
    from engine_worker.runner.debug_tensors import DebugTensors
    from engine_worker.runner.extensions import Extensions
    from engine_worker.sampling.processors import find_processors

    gc.freeze()
    gc.enable()

    def warn(event: str, reason: str) -> None:
        log.warning(event, reason=reason)

    guides = Guides(GuideModel.of(checkpoint), settings)
    # Its processes end with the engine.
    stack.callback(guides.close)
    # Built before the model, which takes long to load, so that invalid settings are reported early.
    extensions = Extensions(
        processors=find_processors(settings, warn),
        output_tensors=settings.output_tensors,
        debug=DebugTensors.of(settings, settings.id, warn),
        guides=guides,
        pool_folder=find_pool_folder(settings, warn),
    )
    config = section_of(settings, RunnerConfig)
    progress, capturing = (progress_of(stage, startup, log) for stage in ("loading", "capturing"))
    checkpoint, draft_model = with_weights(settings, checkpoint, replace(config, ranks_here=rank_env.local_size))
    if settings.tensor_parallel == 1:
        draft = None if draft_model is None else DraftConfig(draft_model, settings.max_draft_batch)
        runner = load_runner(checkpoint, config, progress, capturing, warn, draft, extensions)
    else:
        from engine_worker.parallel.leader import Leader

        leader = stack.enter_context(
            closing(Leader(rank_env, settings.rank_start_timeout, settings.rank_timeout, log, settings.log_level))
        )
        replicated = section_of(settings, ProcessorNames) if settings.logits_processor_replicate else None
        runner = leader.load(
            settings.model, checkpoint, config, progress, capturing, settings.revision, replicated, extensions
        )
    runner.choices["guided"] = why_unavailable() or f"llguidance {version('llguidance')}"
    return checkpoint, runner


def find_pool_folder(settings: EngineSettings, warn: Callable[[str, str], None]) -> "PoolFolder | None":
    """The folder of the KV cache's file; None if there is none, or if the launcher's cannot be used. Raises ValueError
    if the user's cannot."""
    from engine_worker.pool_files.folder import PoolFolder

    # With several ranks each has only a part of a block.
    if settings.pool_folder is None or settings.tensor_parallel > 1:
        return None
    try:
        limited = partial(warn, "kv_file_limited")
        return PoolFolder(Path(settings.pool_folder), settings.id, limited, fetch=settings.kv_fetch)
    except ValueError as error:
        if settings.needs_pool_folder:
            raise
        warn("kv_file_limited", str(error))
        return None


def find_keepers(settings: EngineSettings, runner: Runner) -> "Keepers | None":
    """The keepers that this engine asks; None without `kv_keeper`, or if its blocks are in private memory."""
    if settings.kv_keeper is None or runner.pool_file is None:
        return None
    from engine_worker.keeper.client import KeeperClient
    from engine_worker.keeper.kept_blocks import KeptBlocks

    settings.security.check(settings.kv_keeper)
    return KeptBlocks(KeeperClient(settings.security), settings.kv_keeper, runner.pool_file)


def with_weights(
    settings: EngineSettings, checkpoint: Checkpoint, config: "RunnerConfig"
) -> tuple[Checkpoint, Checkpoint | None]:
    """The model and its draft model, if any, whose weights have been downloaded if necessary. Raises CheckpointError
    and ValueError, before that, if they cannot be served."""
    from engine_worker.backend import check_servable

    limit, context = settings.max_context_tokens, checkpoint.max_context_tokens
    if limit is not None and limit > context:
        raise ValueError(f"max_context_tokens must be at most the model's context, {context} (got {limit})")
    draft = None if settings.draft_model is None else open_checkpoint(settings.draft_model, weights=False)
    check_servable(checkpoint, config, settings.tensor_parallel, draft)
    if settings.weights == "random":
        return checkpoint, draft
    if draft is not None and settings.draft_model is not None:
        draft = fetch_weights(draft, settings.draft_model)
    return fetch_weights(checkpoint, settings.model), draft


def progress_of(
    stage: str, startup: Startup, log: BoundLogger, clock: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """A callback for (done, total) that updates `startup`, which probes show, and logs the first and the last call, and
    one every PROGRESS_SECONDS in between."""
    next_at = clock()

    def progress(done: int, total: int) -> None:
        nonlocal next_at
        startup.report(stage, done, total)
        if clock() >= next_at or done >= total:
            next_at = clock() + PROGRESS_SECONDS
            log.info(stage, done=done, total=total)

    return progress


if __name__ == "__main__":
    run_service("engine_worker", main)
