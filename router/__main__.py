"""`python -m router`: one router process."""

from sluice.host.installation import require_extra
from sluice.host.process import exit_on_signals

if __name__ == "__main__":
    # Before the imports below, which take a second.
    exit_on_signals()
    require_extra("router", "router")

import asyncio
import gc
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from router.api.listener import fit_connections
from router.app import RouterApp
from router.peers.discovery import AddressError
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import Checkpoint, open_checkpoint
from sluice.host.descriptors import raise_limit
from sluice.host.output import protect_stderr
from sluice.host.ports import check_ports
from sluice.host.process import die_with_parent, run_service
from sluice.lanes.keys import InsecureError, KeysError
from sluice.settings.read import load_settings
from sluice.settings.services import RouterSettings
from sluice.telemetry.logs import configure
from sluice.telemetry.server import MetricsPort

SWITCH_SECONDS = 0.0005
"""Switch interval of the interpreter's lock: how long the event loop waits for it while a thread renders a long chat.
Python's own 5 ms would count several times per request."""


def main() -> None:
    """Serve until SIGTERM or SIGINT, then drain. Exits with an error message if the router cannot start."""
    protect_stderr()
    sys.setswitchinterval(SWITCH_SECONDS)
    settings = load_settings(RouterSettings)
    die_with_parent()
    try:
        check_ports(settings.ports)
        # Open before anything that takes long, so that health probes get an answer.
        metrics_port = MetricsPort(settings)
        checkpoint = open_checkpoint(settings.model, settings.name, revision=settings.revision, weights=False)
        if settings.chat_template is not None:
            checkpoint = with_template(checkpoint, Path(settings.chat_template))
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(settings, checkpoint, metrics_port))
    except (AddressError, CheckpointError, InsecureError, KeysError, OSError, RuntimeError) as error:
        raise SystemExit(str(error)) from error


def with_template(checkpoint: Checkpoint, file: Path) -> Checkpoint:
    """Raises CheckpointError."""
    try:
        return replace(checkpoint, chat_template=file.read_text(encoding="utf-8"), tool_use_template=None)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"chat_template: {file} cannot be read: {error}") from error


async def _serve(settings: RouterSettings, checkpoint: Checkpoint, metrics_port: MetricsPort) -> None:
    logger = configure("router", settings.log_level)
    settings = fit_connections(settings, raise_limit(), logger)
    router = RouterApp(settings, checkpoint, logger, metrics_port)
    # Install the handlers after the slow part of the start, so that until then a signal ends the process immediately.
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await router.start()
    # Objects created so far are never freed. Without this, every full garbage collection would traverse them.
    gc.freeze()
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({stop, *router.tasks}, return_when=asyncio.FIRST_COMPLETED)
    failed = [task for task in router.tasks if task.done()]
    logger.info("draining", seconds=settings.drain_timeout)
    await router.stop()
    if not stop.done():
        # A router without heartbeats or a listener cannot serve requests: exit, so that it is restarted.
        raise RuntimeError(f"a background task failed: {[task.exception() or task.get_name() for task in failed]}")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    run_service("router", main)
