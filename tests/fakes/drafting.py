"""Speculation for tests: engines that draft from their first step, and draft tokens with logits."""

from collections.abc import Sequence

import numpy as np

from engine_worker.core.engine import Engine
from engine_worker.speculative.cost import FIRST
from sluice.wire.params import DraftLogits, Speculation

MAX_BATCH_SIZE = 64


def draft_from_the_first_step(engine: Engine) -> None:
    """Record step durations of zero for every batch size, which the engine would otherwise have to measure first."""
    for batch_size in range(1, MAX_BATCH_SIZE + 1):
        for _ in range(FIRST):
            engine.drafting.gain.cost.record(batch_size, 0, 0.0)
            if engine.drafting.model is not None:
                engine.drafting.model.gain.cost.record(batch_size, 0, 0.0)


def proposing(
    tokens: Sequence[int], vocab_size: int, seed: int, most: int | None = 0, threshold: float | None = None
) -> Speculation:
    """Draft tokens with logits. Each token has a probability of one half in its own random distribution."""
    random = np.random.default_rng(seed)
    rows = random.normal(0, 2, (len(tokens), vocab_size)).astype("<f2")
    for row, token in zip(rows, tokens, strict=True):
        row[token] = -np.inf
        row[token] = np.log(np.exp(row.astype(float)).sum())
    return Speculation(most, tuple(tokens), DraftLogits("float16", rows.tobytes()), threshold)
