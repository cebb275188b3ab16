"""Streams with long shared prompts while services die: pool files of engines whose small pools evict all the time."""

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from bench.deaths.kills import KillPlan, KillResult, kill_and_compare
from bench.deaths.requests import StreamRequest
from bench.harness import pool_files
from bench.harness.engine_counters import ADOPTED_BLOCKS, FETCHED_BLOCKS, EngineCounters
from bench.harness.models import SOURCES
from bench.harness.ports import free_ports
from bench.harness.topic import Step
from sluice.launch import Ring

SHARED_CHARACTERS = 2400
"""About 800 tokens: with its own prompt and output, a request stays within the bundled model's context."""
SHARED_PROMPTS = 8
KV_CACHE_TOKENS = 8192
SAMPLE_SECONDS = 0.5
PLAN = KillPlan(24, 120, kills=500, seconds_between=3.0, seed=12, resume_seconds=600.0)
"""A service that is killed this often, also while it starts, is restarted after 10 s. There may be no engine for more
than a minute, and a beam search, which sends nothing before its end, may need many attempts."""


class EvictingResult(msgspec.Struct, frozen=True):
    kills: KillResult
    adopted: int
    """Blocks, over all processes of the engines."""
    fetched: int
    folders: list[str]
    left: list[str]
    """Folders and files that exist after the end of the ring."""

    @property
    def faults(self) -> list[str]:
        """What is wrong; empty if the streams are right, pool files were used, and nothing of them is left."""
        kills = self.kills
        found = list(kills.faults)
        if kills.failed or kills.wrong:
            found.append(f"{kills.failed} streams failed, {kills.wrong} differ")
        if not self.folders:
            found.append("the engines have no kv_folder")
        found += [f"no block was {name}" for name in ("adopted", "fetched") if not getattr(self, name)]
        return found + [f"left behind: {path}" for path in self.left]

    @property
    def summary(self) -> str:
        return f"{self.adopted:,} blocks adopted, {self.fetched:,} fetched, {len(self.left)} files left"


def requests(plan: KillPlan) -> list[StreamRequest]:
    """The requests of the plan, each after one of a few long beginnings."""
    text = "".join(map(inspect.getsource, SOURCES))
    shared = [text[i * SHARED_CHARACTERS :][:SHARED_CHARACTERS] for i in range(SHARED_PROMPTS)]
    return [
        replace(request, prompt=f"{shared[i % SHARED_PROMPTS]}\n{request.prompt}")
        for i, request in enumerate(plan.requests)
    ]


def measure(plan: KillPlan, _: Path, step: Step) -> EvictingResult:
    port = free_ports(plan.routers + plan.engines + plan.detokenizers)
    with plan.ring({"kv_cache_tokens": KV_CACHE_TOKENS}, metrics_port=port) as ring:
        folders = pool_files.folders(ring)
        counters = EngineCounters(ring)
        kills = asyncio.run(_kill_and_count(ring, plan, requests(plan), counters, step))
    left = [str(path) for path in pool_files.left(folders)]
    adopted, fetched = (int(counters.total(metric)) for metric in (ADOPTED_BLOCKS, FETCHED_BLOCKS))
    return EvictingResult(kills, adopted, fetched, sorted(map(str, folders)), left)


async def _kill_and_count(
    ring: Ring, plan: KillPlan, streams: Sequence[StreamRequest], counters: EngineCounters, step: Step
) -> KillResult:
    sampling = asyncio.create_task(counters.run(SAMPLE_SECONDS))
    try:
        return await kill_and_compare(ring, plan, streams, step)
    finally:
        sampling.cancel()
