"""Divides a step into passes: calls of the compiled decoder, each with few enough tokens that its kernels round as they
do for few.

For more tokens the plugin may choose kernels that add up in another order. Measured on a CPU with AVX2 only: with int8
weights from 84 tokens on at the latest, which take as long per token as 80.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from engine_worker.step import Slice
from sluice.settings.engine import OPENVINO_BLOCK

LEAST_TOKENS = 2 * OPENVINO_BLOCK
"""Of the longest pass: so that a slice can always be cut between two blocks, with several tokens on both sides."""


def divide(slices: Sequence[Slice], most: int) -> list[list[Slice]]:
    """The slices of each pass, which has at most `most` tokens, at least LEAST_TOKENS. A slice whose draws alone need
    more is not cut. `scored` and `kept` are meaningless in slices that are cut.

    Cuts are between two blocks, since keys that a block quantizes together must be written together, and never leave a
    single token, which alone would be computed in the shape of a generated token.
    """
    passes: list[list[Slice]] = []
    current: list[Slice] = []
    room = most
    for part in slices:
        while len(part.tokens) > room:
            size = _cut(part, room)
            if size:
                current.append(replace(part, tokens=part.tokens[:size], draws=(), drafts=0, follows=None))
                part = replace(part, tokens=part.tokens[size:], start=part.start + size)
            elif not current:
                break
            passes.append(current)
            current, room = [], most
        current.append(part)
        room -= len(part.tokens)
    return [*passes, current]


def _cut(part: Slice, room: int) -> int:
    """Number of leading tokens for a pass that has room for some; 0: none."""
    # The tokens that are drawn from stay together.
    size = min(room, len(part.tokens) - 1 - part.drafts)
    size = (part.start + size) // OPENVINO_BLOCK * OPENVINO_BLOCK - part.start
    if len(part.tokens) - size == 1:
        size -= OPENVINO_BLOCK
    return size if size > 1 else 0
