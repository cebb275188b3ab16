"""Draws with as little said as possible."""

from collections.abc import Sequence

from engine_worker.step import Draw
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
