"""How much is measured: everything, or just enough to see that it works."""

from pathlib import Path
from typing import Any

from bench.models import TINY, write_qwen3_06b
from bench.parts import batching, peers, prefix, ring
from bench.parts.peers import Work
from bench.parts.ring import Shape

TINY_TITLE = "tiny model (5M parameters)"
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
        engine=_engine(threads),
    )
    if quick:
        return ring.Plan([tiny])
    large = ring.ModelPlan(
        title=LARGE_TITLE,
        model=write_qwen3_06b(folder / "qwen3-0.6b-shape"),
        shapes=[Shape(1, 8, 12), Shape(16, 8, 10), Shape(64, 4, 6)],
        repeats=3,
        engine=_engine(threads) | {"weights": "random", "kv_cache_tokens": 4096},
    )
    return ring.Plan([tiny, large])


def batching_plan(quick: bool, threads: int, _: Path) -> batching.Plan:
    """32 requests, eight at a time."""
    return batching.Plan(
        model=TINY,
        requests=8 if quick else 32,
        width=4 if quick else 8,
        prompt_tokens=32,
        shortest=2 if quick else 8,
        longest=16 if quick else 256,
        repeats=1 if quick else 3,
        engine=_engine(threads),
    )


def prefix_plan(quick: bool, threads: int, _: Path) -> prefix.Plan:
    """Up to about the tiny model's longest prompt."""
    return prefix.Plan(
        model=TINY,
        prompt_tokens=[128] if quick else [256, 512, 1024, 1920],
        share=0.9,
        repeats=1 if quick else 7,
        engine=_engine(threads),
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
    return peers.Plan(TINY, works, 1 if quick else 3, threads, _engine(threads))


def _engine(threads: int) -> dict[str, Any]:
    return {"threads": threads, "kv_cache_tokens": 65536}
