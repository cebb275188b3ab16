"""A step's slices as the graph's inputs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.openvino.graph import INPUTS
from engine_worker.positions import AXES
from engine_worker.runner.batch import rotary_positions
from engine_worker.runner.table_rows import STAND_IN, table_rows
from engine_worker.step import Slice

PADDING = 2
"""Tokens of the sequence that pads small batches."""
LEAST = 2
"""Rows of a matrix product; a single one would get another kernel, and other bits."""
NO_IDS = np.zeros(0, np.int32)
DTYPES = [dtype.to_dtype() for _, dtype, _ in INPUTS]


class PreparedStep:
    """See `engine_worker.runner.forward.PreparedStep`."""

    def __init__(self, lists: list[Any], num_rows: int, num_kept: int, tokens: list[int], draws: list[int]) -> None:
        self.inputs: list[NDArray[Any]] = list(map(np.asarray, lists, DTYPES))
        """In the order of `graph.INPUTS`."""
        self.num_rows = num_rows
        """Without padding."""
        self.num_kept = num_kept
        self.has_rows = num_kept > 0
        self.follows = bool(tokens)
        self._tokens = tokens
        self._draws = draws

    def follow(self, sampled: Tensor) -> None:
        """Fill in the tokens that the previous step drew: `sampled` [D] int64."""
        self.inputs[0][self._tokens] = sampled.numpy()[self._draws]


def prepared_step(
    slices: Sequence[Slice],
    tokens_per_block: int,
    window: int | None,
    smallest: int,
    spare: int,
    no_rows: NDArray[np.float32],
    *,
    axes: bool = False,
) -> PreparedStep:
    """window: the widest of any layer; blocks wholly behind it are left out. Steps of fewer than `smallest` tokens, one
    per sequence, get another sequence, in the block `spare`. no_rows: [0, hidden]. axes: see `Model.has_axes`."""
    virtual = table_rows(slices)
    if len(slices) < smallest and all(len(part.tokens) == 1 for part in slices):
        # Its logits are not read.
        slices = [*slices, Slice([0] * PADDING, 0, [spare])]
    # Lists, which for the few numbers of most steps are faster than arrays, and few calls per slice.
    token_ids: list[int] = []
    positions: list[int] = []
    past: list[int] = []
    starts: list[int] = [0]
    blocks: list[int] = []
    blocks_start: list[int] = [0]
    rows: list[int] = []
    kept: list[int] = []
    tokens: list[int] = []
    draws: list[int] = []
    longest = PADDING
    for part in slices:
        start, count = part.start, len(part.tokens)
        # Attention counts a sequence from the first block that it is given; positions still count from its start.
        skipped = 0 if window is None else max(start - window + 1, 0) // tokens_per_block
        length = start + count - skipped * tokens_per_block
        token_ids += part.tokens
        end = len(token_ids)
        positions += range(start, start + count)
        past.append(length - count)
        starts.append(end)
        blocks += part.block_table[skipped : skipped - (-length // tokens_per_block)]
        blocks_start.append(len(blocks))
        if length > longest:
            longest = length
        if part.drafts:
            rows += range(end - 1 - part.drafts, end)
        elif part.draws:
            rows.append(end - 1)
        if part.kept or part.scored is not None:
            kept += [end - count + index for wanted in part.rows for index in wanted]
        if part.follows is not None:
            tokens.append(end - 1)
            draws.append(part.follows)
    if virtual is not None:
        for token in virtual.tokens.tolist():
            token_ids[token] = STAND_IN
    virtual_tokens, virtual_rows = virtual or (NO_IDS, no_rows)
    num_rows = len(rows)
    rows += [0] * (LEAST - num_rows)
    turned = _by_axes(slices, positions) if axes else positions
    lists: list[Any] = [token_ids, turned, past, starts, blocks, blocks_start, longest, rows, kept or NO_IDS]
    lists += [virtual_tokens, virtual_rows]
    return PreparedStep(lists, num_rows, len(kept), tokens, draws)


def _by_axes(slices: Sequence[Slice], positions: list[int]) -> NDArray[np.int64]:
    """[3 T], token by token."""
    found = rotary_positions(slices, np.array(positions, np.int64))
    return np.broadcast_to(found, (AXES, len(positions))).T.reshape(-1)
