"""How much is checked and measured."""

from dataclasses import dataclass
from typing import Any

from bench.gpu.shapes import LARGE, SMALL, Shape, tiny
from engine_worker.attention.backend import HeadShape


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of everything."""

    small: Shape
    """Where launching counts."""
    large: Shape | None
    """Where memory and arithmetic count; None: only the small one."""
    heads: tuple[HeadShape, ...]
    """Of the attention checks."""
    pages: tuple[int, ...]
    """Tokens per block there."""
    longest: int
    """Context there."""
    rounds: int
    copied: int
    """Bytes."""
    side: int
    """Of the matrices."""
    batches: tuple[int, ...]
    """Of generation."""
    sampled_batches: tuple[int, ...]
    """Of generation that is not greedy."""
    gap_batches: tuple[int, ...]
    peer_batches: tuple[int, ...]
    prompt: int
    """Tokens, of generation."""
    steps: int
    """That are measured on end."""
    prompts: tuple[int, int]
    """How many, and how long, to measure context with."""
    requests: tuple[int, int]
    """How many, and how long at most, of the overlap check."""
    graph_sizes: tuple[int, ...]
    """Batches of the graph check."""
    parity_lengths: tuple[int, ...]
    """Prompts of the parity check."""
    parity_steps: int
    peer_work: tuple[int, int]
    """Prompt and output tokens of each request side by side."""
    tokens_per_step: int
    pace: float
    """By how much the tasks' own estimates are multiplied."""

    def options(self, batch: int, tokens: int, **others: Any) -> dict[str, Any]:
        """Of a runner for so many sequences of so many tokens, with room for what begins or ends beside them."""
        sizes = {"max_batch_size": batch, "max_tokens_per_step": self.tokens_per_step}
        return sizes | {"kv_cache_tokens": (batch + 1) * (tokens + 256)} | others


FULL = Scale(
    small=SMALL,
    large=LARGE,
    heads=(HeadShape(16, 8, 128), HeadShape(32, 8, 128), HeadShape(14, 2, 64), HeadShape(8, 4, 256)),
    pages=(16, 256),
    longest=1500,
    rounds=3,
    copied=4 << 30,
    side=8192,
    batches=(1, 16, 64, 256),
    sampled_batches=(1, 64, 256),
    gap_batches=(1, 64),
    peer_batches=(1, 64),
    prompt=512,
    steps=32,
    prompts=(8, 4096),
    requests=(48, 300),
    graph_sizes=(1, 3, 8, 17, 33, 64),
    parity_lengths=(5, 64, 130, 333),
    parity_steps=32,
    peer_work=(32, 256),
    tokens_per_step=8192,
    pace=1.0,
)


def tiny_scale() -> Scale:
    """To see whether it works."""
    return Scale(
        small=tiny(),
        large=None,
        heads=(HeadShape(4, 2, 64), HeadShape(2, 2, 32)),
        pages=(16,),
        longest=300,
        rounds=2,
        copied=32 << 20,
        side=512,
        batches=(1, 4),
        sampled_batches=(1, 4),
        gap_batches=(1, 4),
        peer_batches=(1, 4),
        prompt=24,
        steps=6,
        prompts=(2, 128),
        requests=(6, 40),
        graph_sizes=(1, 3, 4),
        parity_lengths=(3, 120),
        parity_steps=6,
        peer_work=(8, 16),
        tokens_per_step=256,
        pace=0.1,
    )
