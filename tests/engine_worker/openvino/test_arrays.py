"""The graph's inputs against the arrays that the torch backend builds from the same slices."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.openvino.arrays import MIN_ROWS, PADDING, Pass, build_pass, requested_rows
from engine_worker.runner.batch import build_arrays
from tests.engine_worker.runner.test_batch import HIDDEN_SIZE, steps
from tests.examples import examples

SPARE = 9999
NO_ROWS = np.zeros((0, HIDDEN_SIZE), np.float32)


def built(slices, size, window, smallest) -> Pass:
    return build_pass(slices, requested_rows(slices), size, window, smallest, SPARE, NO_ROWS)


@examples(150)
@given(steps(), st.integers(2, 4))
def test_inputs_equal_the_arrays_for_torch(step, smallest):
    slices, size, window = step
    prepared, arrays = built(slices, size, window, smallest), build_arrays(slices, size, window)
    token_ids, positions, past, starts, blocks, blocks_start, longest, rows, kept_tokens, virtual_tokens, _ = (
        array.tolist() for array in prepared.inputs
    )
    virtual = ([], NO_ROWS) if arrays.virtual_tokens is None else (arrays.virtual_tokens, arrays.virtual_rows)
    assert virtual_tokens == list(virtual[0])
    np.testing.assert_array_equal(prepared.inputs[-1], virtual[1])
    count, padded = len(slices), arrays.generation_rows == len(arrays.token_ids) < smallest
    if padded:
        assert (token_ids[-PADDING:], past[-1], starts[-1], blocks[-1]) == (
            [0] * PADDING,
            0,
            starts[-2] + PADDING,
            SPARE,
        )
        assert blocks_start[-1] == blocks_start[-2] + 1
        token_ids, positions = token_ids[:-PADDING], positions[:-PADDING]
        past, starts, blocks, blocks_start = past[:-1], starts[:-1], blocks[:-1], blocks_start[:-1]
    assert token_ids == arrays.token_ids.tolist()
    assert positions == arrays.positions.tolist()
    assert starts == arrays.query_start.tolist()
    lengths = np.array(past) + np.diff(starts)
    np.testing.assert_array_equal(lengths, arrays.context_lengths)
    for i in range(count):
        used = -(-lengths[i] // size)
        assert blocks[blocks_start[i] : blocks_start[i + 1]] == arrays.block_tables[i, :used].tolist()
    assert len(blocks) == blocks_start[count]
    assert longest == max(PADDING, arrays.max_context)
    last = range(len(token_ids)) if arrays.last_tokens is None else arrays.last_tokens.tolist()
    assert rows == [*last, *[0] * (MIN_ROWS - len(last))]
    assert prepared.num_rows == len(last)
    assert kept_tokens == ([] if arrays.kept_tokens is None else arrays.kept_tokens.tolist())
    assert prepared.num_kept == len(kept_tokens)


@examples(50)
@given(steps(), st.integers(0, 9))
def test_follow_fills_in_the_tokens_that_the_previous_step_sampled(step, number):
    slices, size, window = step
    prepared, arrays = built(slices, size, window, 2), build_arrays(slices, size, window)
    placeholders = prepared.inputs[0].tolist()
    assert prepared.follows == bool(len(arrays.follow_tokens))
    if prepared.follows:
        prepared.follow(torch.tensor([number, 1, 2, number + 3]))
    draws = dict(zip(arrays.follow_tokens.tolist(), arrays.follow_draws.tolist(), strict=True))
    assert prepared.inputs[0].tolist() == [
        {0: number, 3: number + 3}[draws[i]] if i in draws else token for i, token in enumerate(placeholders)
    ]
