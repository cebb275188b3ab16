"""The whole ring on this machine: a router, an engine, detokenizers and a gRPC client, each a process."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.harness.children import SystemProcess, cpu_seconds
from bench.harness.load import Load, Run
from sluice.launch import Ring

NAME = "Sluice, through the ring"


class ThroughRing:
    """Serves loads through a running ring. CPU seconds are by role, and of the client."""

    name = NAME

    def __init__(self, pids: Mapping[str, int], client: SystemProcess[Run]) -> None:
        self._pids = pids
        self._client = client

    def run(self, load: Load) -> Run:
        # The client reports its own CPU time; that of the services is read from outside.
        before = self._cpu()
        run = self._client.run(load)
        used = {role: seconds - before[role] for role, seconds in self._cpu().items()}
        return replace(run, cpu=used | run.cpu)

    def _cpu(self) -> dict[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for name, pid in self._pids.items():
            found[name.partition("-")[0]] += cpu_seconds(pid)
        return dict(found)


@contextmanager
def through_ring(model: Path, engine: Mapping[str, Any], logs: Path) -> Iterator[ThroughRing]:
    with (
        (logs / "ring.log").open("a", encoding="utf-8") as log,
        Ring(model, engine_args=engine, observe=lambda line: print(line.text, file=log, flush=True)) as ring,
        SystemProcess("client", "bench.systems.ring_client", [ring.address], logs / "client.log", Run) as client,
    ):
        yield ThroughRing(ring.pids, client)
