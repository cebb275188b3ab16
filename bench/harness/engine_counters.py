"""Counters of a ring's engines, read from their metrics pages and summed over all processes of each engine."""

import asyncio
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from http.client import HTTPException

from sluice.launch import Ring

PREFIX = "sluice_engine_"
CONTEXT_TOKENS = f"{PREFIX}context_tokens_total"
"""Tokens computed as context, including those that are computed again."""
ADOPTED_BLOCKS = f"{PREFIX}kv_adopted_blocks_total"
FETCHED_BLOCKS = f"{PREFIX}kv_fetched_blocks_total"
ACTIVE_REQUESTS = f"{PREFIX}requests_active"
SCRAPE_SECONDS = 5.0
POLL_SECONDS = 0.05


class EngineCounters:
    """The ring needs a `metrics_port`. A process that has died or is frozen keeps the values of its last sample."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        engines = [name for name, child in ring.children.items() if child.role == "engine"]
        # The ports of routers come first.
        self._ports = {name: ring.plan.metrics_port + ring.plan.routers + i for i, name in enumerate(engines)}
        self._seen: dict[tuple[str, int], dict[str, float]] = {}

    async def sample(self) -> dict[str, dict[str, float]]:
        """The metrics of the engines that answer, by engine."""
        pids = self._ring.pids
        pages = await asyncio.gather(*(asyncio.to_thread(_scrape, port) for port in self._ports.values()))
        answers = dict(zip(self._ports, pages, strict=True))
        # A page is left out if another process may have sent it.
        same = [name for name, pid in self._ring.pids.items() if pids.get(name) == pid]
        found = {name: page for name, page in answers.items() if CONTEXT_TOKENS in page and name in same}
        self._seen.update({(name, pids[name]): page for name, page in found.items()})
        return found

    def total(self, metric: str) -> float:
        """The sum of a counter over all processes sampled so far."""
        return sum(page.get(metric, 0.0) for page in self._seen.values())

    async def busy(self) -> str:
        """The first engine that has a request. Waits for one."""
        while True:
            for name, page in (await self.sample()).items():
                if page[ACTIVE_REQUESTS]:
                    return name
            await asyncio.sleep(POLL_SECONDS)

    async def run(self, seconds: float) -> None:
        """Samples again and again, so that processes that die are counted too. Ends when it is cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(seconds)


def _scrape(port: int) -> dict[str, float]:
    """Empty if the process does not answer: it may be dead, frozen or starting."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_SECONDS) as page:
            return parse(page.read().decode().splitlines())
    except (OSError, HTTPException):
        return {}


def parse(page: Sequence[str]) -> dict[str, float]:
    """The values of a page in Prometheus' text format, summed over labels."""
    values: defaultdict[str, float] = defaultdict(float)
    for line in page:
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0]] += float(value)
    return dict(values)
