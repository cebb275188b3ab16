"""The sizes for which graphs are captured, and the graph that a step uses."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine_worker.runner.batch import build_arrays
from engine_worker.runner.buffers import (
    LARGEST,
    ContextBuffers,
    GenerationBuffers,
    context_sizes,
    generation_sizes,
    table_width,
)
from engine_worker.runner.graphs import Graphs
from engine_worker.step import Slice
from tests.fakes.graphs import FakeCapture

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (5, [1, 2, 4, 5]),
        (8, [1, 2, 4, 8]),
        (16, [1, 2, 4, 8, 16]),
        (20, [1, 2, 4, 8, 16, 20]),
        (48, [1, 2, 4, 8, 16, 32, 48]),
    ],
)
def test_sizes(batch, sizes):
    assert generation_sizes(batch) == sizes


def test_a_very_large_batch_has_no_graph():
    assert generation_sizes(4096)[-1] == LARGEST
    assert generation_sizes(4096) == sorted(set(generation_sizes(4096)))


def test_captures_the_largest_first_and_uses_the_smallest_that_fits():
    sizes = []

    def compute(token_ids, positions, inputs):
        sizes.append((len(token_ids), len(positions), len(inputs.slots), *inputs.block_tables.shape))
        assert inputs.max_query == 1
        assert inputs.query_start.tolist() == list(range(len(token_ids) + 1))
        assert inputs.max_context == 12
        return torch.zeros(len(token_ids), 6)

    with torch.inference_mode():
        graphs = Graphs(compute, lambda inputs: inputs, GenerationBuffers(20, 3, 4, CPU), FakeCapture())
    assert list(dict.fromkeys(sizes)) == [(n, n, n, n, 3) for n in (20, 16, 8, 4, 2, 1)]

    def arrays(rows: int, blocks: int = 1):
        return build_arrays([Slice([1], blocks * 4 - 1, range(blocks), ()) for _ in range(rows)], 4, None)

    assert [graphs.fit(arrays(n)) for n in (1, 2, 3, 4, 5, 9, 16, 17, 20)] == [1, 2, 4, 4, 8, 16, 16, 20, 20]
    assert graphs.fit(arrays(21)) is None
    assert (graphs.fit(arrays(2, 3)), graphs.fit(arrays(2, 4))) == (2, None)
    assert graphs.fit(replace(arrays(2), max_query=2)) is None
    # A prompt's last token, which is a row of a table.
    assert graphs.fit(replace(arrays(2), virtual_tokens=np.array([1]))) is None
    assert graphs.fit(replace(arrays(2), positions=np.zeros((3, 2), np.int64))) is None


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(5, [5]), (8, [8]), (40, [8, 16, 32, 40]), (8192, [8, 16, 32, 64, 128, 256, 512])]
)
def test_sizes_of_steps_with_context(tokens, sizes):
    assert context_sizes(tokens) == sizes


def test_which_steps_with_context_fit_a_graph():
    with torch.inference_mode():
        graphs = Graphs(
            lambda ids, *_: torch.zeros(len(ids), 2),
            lambda inputs: inputs,
            ContextBuffers(40, 3, 5, 4, CPU),
            FakeCapture(),
        )

    def arrays(*counts: int, start: int = 0):
        return build_arrays([Slice([1] * count, start, range(16), ()) for count in counts], 4, None)

    assert [graphs.fit(arrays(*counts)) for counts in ((3,), (8, 1), (20, 5, 7), (13, 20))] == [8, 16, 32, 40]
    assert graphs.fit(arrays(20, 20, 1)) is None
    assert graphs.fit(arrays(1, 1, 1, 2)) is None
    assert (graphs.fit(arrays(2, start=18)), graphs.fit(arrays(2, start=19))) == (8, None)
    assert graphs.fit(replace(arrays(2), adapters=np.array([1]))) is None


def test_prepared_inputs_live_as_long_as_the_graphs():
    """A graph only refers to their addresses."""

    class Forgetful:
        def __call__(self, work):
            work()
            return self

    made = []

    def prepare(inputs):
        prepared = replace(inputs, slots=inputs.slots.clone())
        made.append(weakref.ref(prepared.slots))
        return prepared

    with torch.inference_mode():
        graphs = Graphs(lambda ids, *_: torch.zeros(len(ids), 2), prepare, GenerationBuffers(4, 1, 4, CPU), Forgetful())
    gc.collect()
    assert len(graphs.sizes) == 3
    assert sum(ref() is not None for ref in made) == 3


@pytest.mark.parametrize("tokens_per_block", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 17])
def test_no_generation_step_has_a_longer_table(tokens_per_block, window):
    widest = table_width(50, window, tokens_per_block)
    widths = [
        build_arrays([Slice([1], start, range(60), ())], tokens_per_block, window).block_tables.shape[1]
        for start in range(50)
    ]
    assert max(widths) == widest
    assert np.all(np.diff(widths[: window or 50]) >= 0)
