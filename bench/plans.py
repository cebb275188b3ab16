"""How much is measured: everything, or just enough to see that it works."""

from pathlib import Path
from typing import Any

from bench.models import TINY, write_qwen3_06b
from bench.parts import (
    chunked,
    host,
    peers,
    policies,
    prefix,
    retention,
    ring,
    scheduler,
)
from bench.parts.peers import Work
from bench.parts.policies import Mix
from bench.parts.ring import Shape

TINY_TITLE = "tiny model (5M parameters)"
TINY_BYTES_PER_TOKEN = 6 * 2 * 2 * 64 * 4
"""Of its KV cache: layers, keys and values, heads, their size, float32."""
LARGE_TITLE = "Qwen3-0.6B shape, random weights"


def ring_plan(quick: bool, threads: int, folder: Path) -> ring.Plan:
    """The tiny model and, where there is time, a large one; a step of that one takes some tenths of a second."""
    tiny = ring.ModelPlan(
        title=TINY_TITLE,
        model=TINY,
        shapes=[Shape(1, 16, 8), Shape(4, 16, 8)]
        if quick
        else [Shape(1, 64, 256), Shape(16, 64, 128), Shape(64, 64, 128)],
        repeats=1 if quick else 5,
        engine=engine_settings(threads),
    )
    if quick:
        return ring.Plan([tiny])
    large = ring.ModelPlan(
        title=LARGE_TITLE,
        model=write_qwen3_06b(folder / "qwen3-0.6b-shape"),
        shapes=[Shape(1, 8, 12), Shape(16, 8, 10), Shape(64, 4, 6)],
        repeats=3,
        engine=engine_settings(threads) | {"weights": "random", "kv_cache_tokens": 4096},
    )
    return ring.Plan([tiny, large])


def prefix_plan(quick: bool, threads: int, _: Path) -> prefix.Plan:
    """Up to about the tiny model's longest prompt."""
    return prefix.Plan(
        model=TINY,
        prompt_tokens=[128] if quick else [256, 512, 1024, 1920],
        share=0.9,
        repeats=1 if quick else 7,
        engine=engine_settings(threads),
    )


def peers_plan(quick: bool, threads: int, _: Path) -> peers.Plan:
    """A batch, a mixed batch, and a single stream."""
    works = [
        Work("32 requests at once, 128 tokens in, 128 out", 32, 32, 128, 128, 128),
        Work("32 requests, 8 at a time, 32 tokens in, 8 to 256 out", 32, 8, 32, 8, 256),
        Work("one stream, 128 tokens in, 128 out", 1, 1, 128, 128, 128),
    ]
    if quick:
        works = [Work("4 requests, 2 at a time, 16 tokens in, 2 to 8 out", 4, 2, 16, 2, 8)]
    return peers.Plan(TINY, works, 1 if quick else 3, threads, engine_settings(threads))


def policies_plan(quick: bool, threads: int, _: Path) -> policies.Plan:
    """32 requests that come at once."""
    mixes = [
        Mix("lengths spread evenly, 8 at a time", False, 8),
        Mix("one in eight is long, 8 at a time", True, 8),
        Mix("one in eight is long, 16 at a time", True, 16),
        Mix("spread, 16 at a time, cache of 1,536 tokens", False, 16, pool=1536),
        Mix("max_tokens unset, 16 at a time, cache of 4,096", False, 16, pool=4096, max_tokens=2016),
    ]
    scarce = Mix("max_tokens unset, 4 at a time, cache of 128", True, 4, pool=128, max_tokens=64)
    return policies.Plan(
        model=TINY,
        requests=16 if quick else 32,
        prompt_tokens=32,
        shortest=2 if quick else 8,
        longest=16 if quick else 256,
        mixes=[Mix("one in eight is long, 4 at a time", True, 4), scarce] if quick else mixes,
        repeats=1 if quick else 3,
        engine=engine_settings(threads),
    )


def chunked_plan(quick: bool, threads: int, _: Path) -> chunked.Plan:
    """A prompt of nearly the tiny model's whole context."""
    return chunked.Plan(
        model=TINY,
        streams=2 if quick else 8,
        stream_tokens=16 if quick else 96,
        context_tokens=300 if quick else 2000,
        newcomers=2 if quick else 8,
        newcomer_tokens=16,
        output_tokens=4,
        tokens_per_step=64 if quick else 256,
        repeats=1 if quick else 15,
        engine=engine_settings(threads),
    )


def scheduler_plan(quick: bool, _threads: int, _: Path) -> scheduler.Plan:
    """Up to a thousand sequences, with and without as many that wait."""
    return scheduler.Plan(
        running=[1, 8] if quick else [1, 64, 256, 1024],
        waiting=[0, 10] if quick else [0, 1000],
        samples=5 if quick else 200,
        repeats=1 if quick else 3,
    )


def retention_plan(quick: bool, threads: int, _: Path) -> retention.Plan:
    """A system prompt of an eighth of the pool, kept for an hour."""
    return retention.Plan(
        model=TINY,
        pool_tokens=1024 if quick else 4096,
        system_tokens=128 if quick else 512,
        question_tokens=32,
        floods=[2.0] if quick else [0.5, 1.0, 2.0, 4.0],
        visits=1 if quick else 3,
        seconds=3600.0,
        repeats=1,
        engine=engine_settings(threads),
    )


def host_plan(quick: bool, threads: int, _: Path) -> host.Plan:
    """Working sets of up to four times the pool, a host tier of two and a half times the pool."""
    pool = 512 if quick else 4096
    return host.Plan(
        model=TINY,
        pool_tokens=pool,
        host_tokens=5 * pool // 2,
        bytes_per_token=TINY_BYTES_PER_TOKEN,
        prompt_tokens=120 if quick else 504,
        output_tokens=8,
        working_sets=[3.0] if quick else [0.5, 1.0, 2.0, 3.0, 4.0],
        visits=1 if quick else 2,
        repeats=1 if quick else 2,
        engine=engine_settings(threads),
    )


def engine_settings(threads: int) -> dict[str, Any]:
    """Of the tiny model's engine."""
    return {"threads": threads, "kv_cache_tokens": 65536}
