"""Prometheus metrics of a keeper; docs/metrics.md lists them. `read` is called in the thread of the scrape."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from engine_worker.keeper.disk import DiskTier
from engine_worker.keeper.server import Keeper
from sluice.host.output import lines_lost
from sluice.telemetry.metrics import counter, gauge

P = "sluice_keeper_"


def read(keeper: Keeper, disk: DiskTier | None) -> Iterator[Metric]:
    yield counter(P + "questions", "Questions of engines, by answer.", keeper.answers, ("answer",))
    yield counter(P + "blocks_read", "Blocks sent to engines, by where they were.", keeper.read, ("tier",))
    yield gauge(P + "disk_blocks", "Blocks on disk.", 0 if disk is None else disk.num_blocks)
    yield gauge(P + "disk_bytes", "Bytes of the blocks on disk.", 0 if disk is None else disk.num_bytes)
    text = "Blocks on disk that were deleted because they were not whole."
    yield counter(P + "disk_damaged", text, 0 if disk is None else disk.damaged)
    yield counter(P + "peers_refused", "Connections refused because their key is not admitted.", keeper.refused)
    yield counter(P + "log_lines_lost", "Log lines that could not be written.", lines_lost())
