"""Draws with as little said as possible."""

from collections.abc import Sequence

from torch import Tensor

from engine_worker.sampling.sampler import sample
from engine_worker.step import Draw, Drawn
from sluice.ring.params import SamplingParams


def draw(
    *,
    sequence: int = 0,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: tuple[int, ...] = (),
    **sampling: object,
) -> Draw:
    return Draw(SamplingParams(**sampling), sequence, position, prompt, output, banned)


def sampled(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn]:
    """As plain data."""
    return sample(logits, rows, draws).results(draws)
