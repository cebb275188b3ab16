"""`python -m engine_worker.keeper`: the keeper of a machine."""

from sluice.host.installation import require_extra
from sluice.host.process import die_with_parent, exit_on_signals, on_stop_signal, run_service

if __name__ == "__main__":
    # Before the imports below.
    exit_on_signals()
    require_extra("engine_worker.keeper", "keeper")

import threading
import time
from functools import partial

from structlog.stdlib import BoundLogger

from engine_worker.keeper import metrics
from engine_worker.keeper.disk import DiskTier
from engine_worker.keeper.server import Keeper
from engine_worker.keeper.sweep import Sweep
from engine_worker.pool_files.memory import check_folder
from sluice.host.descriptors import OWN_DESCRIPTORS, check_limit, raise_limit
from sluice.host.output import protect_stderr
from sluice.host.ports import check_ports
from sluice.settings.keeper import KeeperSettings
from sluice.settings.read import changed_settings, load_settings
from sluice.telemetry.logs import configure
from sluice.telemetry.server import MAX_CONNECTIONS, MetricsPort
from sluice.telemetry.service_status import ProgressBeacon, ServiceStatus, StatusFile

IDLE_SECONDS = 0.1
"""Longest wait for questions, and so until SIGTERM is noticed."""
LINGER_SECONDS = 0.5
"""Time without a question after which nothing is being copied any more."""
MAX_ENGINES = 256
"""Connections of engines for which descriptors are needed."""


def main() -> None:
    """Serve until SIGTERM or SIGINT. Exits with an error message if it cannot start."""
    protect_stderr()
    die_with_parent()
    settings = load_settings(KeeperSettings)
    log = configure("keeper", settings.log_level).bind(id=settings.id)
    check_limit(raise_limit(), OWN_DESCRIPTORS + MAX_CONNECTIONS + MAX_ENGINES, log)
    try:
        check_ports(settings.ports)
        check_folder(settings.kv_folder)
        metrics_port = MetricsPort(settings)
        disk = _disk(settings, log)
        disk_failed = disk is None and settings.disk_folder is not None
        keeper = Keeper(settings.listen, settings.security, settings.kv_folder, disk, disk_failed)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    sweep = None if disk is None else Sweep(settings.kv_folder, disk, settings.disk_bytes)
    if sweep is not None:
        sweep.start()
    status_file = StatusFile()
    beacon = ProgressBeacon(status_file=status_file)
    metrics_port.show(beacon, partial(metrics.read, keeper, disk), lambda: None)
    stopped = threading.Event()
    on_stop_signal(stopped.set)
    stored = {} if disk is None else {"disk_blocks": disk.num_blocks}
    log.info("ready", address=keeper.address, **stored, settings=changed_settings(settings))
    status_file.report(ServiceStatus("ready", keeper.address))
    while not stopped.is_set():
        beacon.touch(progressed=keeper.serve(IDLE_SECONDS))
    _finish(keeper, settings.drain_timeout)
    if sweep is not None:
        sweep.stop()
    metrics_port.close()
    keeper.close()
    log.info("stopped", **keeper.answers)


def _disk(settings: KeeperSettings, log: BoundLogger) -> DiskTier | None:
    """None without a disk, or with one that fails. Raises ValueError if its folder must not be used."""
    if settings.disk_folder is None:
        return None
    try:
        return DiskTier(settings.disk_folder, settings.disk_bytes)
    except OSError as error:
        log.warning("disk_failed", not_done="opened", error=error.strerror or str(error))
        return None


def _finish(keeper: Keeper, seconds: float) -> None:
    """Answer engines that are still copying what a draining engine of this machine has left."""
    end, answered = time.monotonic() + seconds, -1
    while (keeper.waits or answered < keeper.answers.total()) and time.monotonic() < end:
        answered = keeper.answers.total()
        keeper.serve(LINGER_SECONDS)


if __name__ == "__main__":
    run_service("engine_worker.keeper", main)
