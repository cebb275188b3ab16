"""Drafts without the steps that an engine needs first, to learn how long steps take."""

from engine_worker.core.engine import Engine
from engine_worker.speculative.cost import FIRST

MAX_BATCH_SIZE = 64


def draft_from_the_first_step(engine: Engine) -> None:
    for batch_size in range(1, MAX_BATCH_SIZE + 1):
        for _ in range(FIRST):
            engine.drafting.cost.record(batch_size, 0, 0.0)
