"""Builds the graph's inputs from the slices of a step, or of a part of one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.openvino.graph import INPUTS
from engine_worker.positions import AXES
from engine_worker.runner.batch import STAND_IN, adapter_numbers, rotary_positions, table_rows
from engine_worker.step import Slice

PADDING = 2
"""Number of tokens in the sequence that pads small batches."""
MIN_ROWS = 2
"""Fewest rows of a matrix product: for a single row the plugin uses another kernel, whose results differ in their last
bits."""
NO_IDS = np.zeros(0, np.int32)
DTYPES = [dtype.to_dtype() for _, dtype, _ in INPUTS]


class StepNumbers(NamedTuple):
    """Which tokens have which LoRA adapter."""

    numbers: NDArray[np.int64]
    """[B]: see `StepArrays.adapters`."""
    query_start: NDArray[np.int32]
    """[B + 1]: index of each slice's first token."""

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> "StepNumbers | None":
        """None: no slice has an adapter."""
        numbers = adapter_numbers(slices)
        if numbers is None:
            return None
        return cls(numbers, np.cumsum([0, *(len(part.tokens) for part in slices)], dtype=np.int32))


class Pass:
    """Inputs of one call of the compiled decoder."""

    def __init__(
        self,
        lists: list[Any],
        num_rows: int,
        num_kept: int,
        adapters: StepNumbers | None,
        tokens: list[int],
        draws: list[int],
    ) -> None:
        self.inputs: list[NDArray[Any]] = list(map(np.asarray, lists, DTYPES))
        """In the order of `graph.INPUTS`."""
        self.num_rows = num_rows
        """Rows of logits to sample from, without padding."""
        self.num_kept = num_kept
        """Rows whose hidden states are returned."""
        self.adapters = adapters
        """None: no slice has a LoRA adapter."""
        self.follows = bool(tokens)
        self._tokens = tokens
        self._draws = draws

    def follow(self, sampled: Tensor) -> None:
        """Fill in the tokens that the previous step sampled: `sampled` [D] int64."""
        self.inputs[0][self._tokens] = sampled.numpy()[self._draws]


class PreparedStep(NamedTuple):
    """See `engine_worker.runner.forward.PreparedStep`."""

    passes: list[Pass]
    follows: bool
    has_rows: bool
    kept: NDArray[np.int64] | None = None
    """The requested rows, as indexes among those that the passes return; None: these, in their order."""

    def follow(self, sampled: Tensor) -> None:
        for one in self.passes:
            if one.follows:
                one.follow(sampled)


def requested_rows(slices: Sequence[Slice]) -> list[int]:
    """Indexes among the step's tokens of the rows of `Slice.rows`, in their order."""
    rows: list[int] = []
    start = 0
    for part in slices:
        if part.kept or part.scored is not None:
            rows += [start + index for indexes in part.rows for index in indexes]
        start += len(part.tokens)
    return rows


def divided_rows(rows: Sequence[int], passes: Sequence[Sequence[Slice]]) -> tuple[list[list[int]], NDArray[np.int64]]:
    """For the requested rows of a step: indexes among each pass' tokens, ascending, and `PreparedStep.kept`."""
    distinct, order = np.unique(np.array(rows, np.int64), return_inverse=True)
    ends = np.cumsum([sum(len(part.tokens) for part in slices) for slices in passes])
    shares = np.split(distinct, np.searchsorted(distinct, ends[:-1]))
    starts = [0, *ends[:-1].tolist()]
    return [(share - start).tolist() for share, start in zip(shares, starts, strict=True)], order


def build_pass(
    slices: Sequence[Slice],
    kept: Sequence[int],
    tokens_per_block: int,
    window: int | None,
    smallest: int,
    spare: int,
    no_rows: NDArray[np.float32],
    *,
    axes: bool = False,
    adapters: bool = False,
) -> Pass:
    """kept: tokens whose hidden states are returned. window: the widest of any layer; blocks entirely outside of it are
    omitted. no_rows: [0, hidden]. axes: see `Model.has_axes`. adapters: whether slices may have LoRA adapters.

    A pass of fewer than `smallest` sequences with one token each is padded with one more sequence, in block `spare`.
    """
    numbers = StepNumbers.of(slices) if adapters else None
    virtual = table_rows(slices) if any(part.virtual is not None for part in slices) else None
    if len(slices) < smallest and _all_single(slices) and sum(len(part.tokens) for part in slices) < smallest:
        # The padding sequence's logits are not read.
        slices = [*slices, Slice([0] * PADDING, 0, [spare])]
    # Lists, and few calls per slice: for the few numbers of a typical step, lists are faster than arrays.
    token_ids: list[int] = []
    positions: list[int] = []
    past: list[int] = []
    starts: list[int] = [0]
    blocks: list[int] = []
    blocks_start: list[int] = [0]
    rows: list[int] = []
    tokens: list[int] = []
    draws: list[int] = []
    longest = PADDING
    for part in slices:
        start, count = part.start, len(part.tokens)
        token_ids += part.tokens
        end = len(token_ids)
        positions += range(start, start + count)
        # For attention, separate tokens are sequences with the same blocks. It writes all keys and values before it
        # reads any, so that each token finds those before it.
        size = 1 if part.separate else count
        for first in range(start, start + count, size):
            # A sequence starts at the first block that it gets; positions count from the sequence's start.
            skipped = 0 if window is None else max(first - window + 1, 0) // tokens_per_block
            length = first + size - skipped * tokens_per_block
            past.append(length - size)
            starts.append(starts[-1] + size)
            blocks += part.block_table[skipped : skipped - (-length // tokens_per_block)]
            blocks_start.append(len(blocks))
            if length > longest:
                longest = length
        if part.draws:
            rows += range(end - 1 - part.drafts, end)
        if part.follows is not None:
            tokens.append(end - 1)
            draws.append(part.follows)
    if virtual is not None:
        for token in virtual.tokens.tolist():
            token_ids[token] = STAND_IN
    virtual_tokens, virtual_rows = virtual or (NO_IDS, no_rows)
    num_rows = len(rows)
    rows += [0] * (MIN_ROWS - num_rows)
    rotary = _by_axes(slices, positions) if axes else positions
    lists: list[Any] = [token_ids, rotary, past, starts, blocks, blocks_start, longest, rows, list(kept) or NO_IDS]
    lists += [virtual_tokens, virtual_rows]
    return Pass(lists, num_rows, len(kept), numbers, tokens, draws)


def _all_single(slices: Sequence[Slice]) -> bool:
    """Whether each sequence has one token for attention."""
    return all(part.separate or len(part.tokens) == 1 for part in slices)


def _by_axes(slices: Sequence[Slice], positions: list[int]) -> NDArray[np.int64]:
    """M-RoPE positions [3 T]: the three axes of the first token, then of the next."""
    rotary = rotary_positions(slices, np.array(positions, np.int64))
    return np.broadcast_to(rotary, (AXES, len(positions))).T.reshape(-1)
