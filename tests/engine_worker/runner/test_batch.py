from itertools import takewhile

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.positions import PlacedGrid, Positions
from engine_worker.runner.batch import StepArrays, build_arrays
from engine_worker.runner.buffers import ContextBuffers, GenerationBuffers
from engine_worker.runner.compute import StepDraws
from engine_worker.step import Draw, Kept, Scored, Slice
from sluice.wire.params import SamplingParams
from sluice.wire.tables import PromptTables, VirtualTokens
from tests.examples import examples
from tests.fakes.tables import table_of

VOCABULARY = 500
HIDDEN_SIZE = 2
VALUES = [[1.5, -2.0], [0.25, 0.0], [3.0, -0.125], [8.0, 1.0]]
"""Exactly representable in every dtype of tables."""
TABLES = [
    PromptTables((table_of(torch.tensor(VALUES)),)),
    PromptTables((table_of(torch.tensor(VALUES[:3], dtype=torch.float16)), table_of(torch.tensor(VALUES[3:])))),
    PromptTables(tuple(table_of(torch.tensor([row], dtype=torch.bfloat16)) for row in VALUES)),
]


def row_of(virtual: VirtualTokens, row: int) -> list[float]:
    assert sum(table.rows for table, _ in virtual.placed) == len(VALUES)
    return VALUES[row]


def draw(sequence: int) -> Draw:
    return Draw(SamplingParams(), sequence, 0)


def test_a_mixed_step():
    first, second, third = draw(0), draw(1), draw(2)
    slices = (
        Slice([7, 8, 9], 3, [5, 2, 99], (first, second)),
        Slice([4], 0, [1]),
        Slice([6], 8, [9, 8, 7], (third,)),
    )
    arrays, work = build_arrays(slices, 4, None), StepDraws.of(slices)
    assert arrays.token_ids.tolist() == [7, 8, 9, 4, 6]
    assert arrays.positions.tolist() == [3, 4, 5, 0, 8]
    assert arrays.slots.tolist() == [23, 8, 9, 4, 28]
    assert arrays.block_tables.tolist() == [[5, 2, 0], [1, 0, 0], [9, 8, 7]]
    assert arrays.query_start.tolist() == [0, 3, 4, 5]
    assert arrays.context_lengths.tolist() == [6, 1, 9]
    assert (arrays.max_query, arrays.max_context) == (3, 9)
    assert arrays.generation_rows == 0
    assert arrays.last_tokens.tolist() == [2, 4]
    assert work.draws == [first, second, third]
    assert work.rows == [0, 0, 1]


def test_generation_needs_all_rows():
    arrays = build_arrays((Slice([4], 5, [1, 2], (draw(0),)), Slice([6], 0, [3], (draw(0),))), 4, None)
    assert arrays.positions.tolist() == [5, 0]
    assert arrays.slots.tolist() == [9, 12]
    assert arrays.last_tokens is None


def test_block_tables_start_at_the_widest_window():
    unread = 1 << 24
    arrays = build_arrays(
        (
            Slice([7, 8], 21, [unread, unread, unread, unread, 5, 2], (draw(0),)),
            Slice([4], 3, [1], (draw(0),)),
            Slice([6, 6, 6, 6, 6], 9, [unread, 9, 8, 7], (draw(0),)),
        ),
        4,
        6,
    )
    assert arrays.positions.tolist() == [21, 22, 3, 9, 10, 11, 12, 13]
    assert arrays.slots.tolist() == [9, 10, 7, 33, 34, 35, 28, 29]
    assert arrays.block_tables.tolist() == [[5, 2, 0], [1, 0, 0], [9, 8, 7]]
    assert arrays.context_lengths.tolist() == [7, 4, 10]
    assert (arrays.max_query, arrays.max_context) == (5, 10)


@st.composite
def steps(draw):
    """(slices, tokens_per_block, window): random lengths, tables with spare entries, draws and followed draws."""
    size = draw(st.sampled_from([1, 3, 16]))
    window = draw(st.sampled_from([None, 1, 5, 20]))
    generation = draw(st.booleans())
    slices = []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 60))
        tokens = draw(st.lists(st.integers(0, 999), min_size=1, max_size=1 if generation else 20))
        needed = -(-(start + len(tokens)) // size)
        table = draw(st.lists(st.integers(0, 5000), min_size=needed, max_size=needed + 3))
        draws = tuple(Draw(SamplingParams(), i, 0) for i in range(draw(st.integers(0, 2))))
        first = draw(st.integers(0, len(tokens) - 1))
        behind = draw(st.lists(st.integers(0, 999), min_size=1, max_size=len(tokens) - first))
        scored = draw(st.sampled_from([None, Scored(start + first, behind, 0)]))
        kept = tuple(
            Kept(start + at, draw(st.integers(1, len(tokens) - at)), ("logits",), draw(st.booleans()))
            for at in draw(st.lists(st.integers(0, len(tokens) - 1), max_size=2))
        )
        follows = draw(st.sampled_from([None, 0, 3]))
        virtual = None
        if draw(st.booleans()):
            virtual = VirtualTokens.of(VOCABULARY, draw(st.sampled_from(TABLES)))
            tokens = [token % (VOCABULARY + virtual.placed[-1].first + 1) for token in tokens]
        slices.append(Slice(tokens, start, table, draws, follows, scored=scored, kept=kept, virtual=virtual))
    return slices, size, window


def check_rows(arrays: StepArrays, expected: dict[int, list[float]]) -> None:
    """`expected`: rows of virtual tokens, by token."""
    if arrays.virtual_tokens is None:
        assert not expected
        return
    assert arrays.virtual_tokens.tolist() == list(expected)
    assert arrays.virtual_rows.tolist() == list(expected.values())
    assert (arrays.virtual_tokens.dtype, arrays.virtual_rows.dtype) == (np.int64, np.float32)


@examples(150)
@given(steps())
def test_a_step_token_by_token(step):
    """Each array agrees with its meaning, computed in plain loops."""
    slices, size, window = step
    arrays, work, token, row, draw = build_arrays(slices, size, window), StepDraws.of(slices), 0, 0, 0
    rows, followed, draw_follows, kept_tokens, virtual_rows = [], [], {}, [], {}
    for i, part in enumerate(slices):
        first_seen = 0 if window is None else max(0, part.start - window + 1)
        skipped = first_seen // size
        table = [int(block) for block in arrays.block_tables[i]]
        length = part.start + len(part.tokens) - skipped * size
        assert arrays.query_start[i] == token
        assert arrays.context_lengths[i] == length
        for at in range(first_seen, part.start + len(part.tokens)):
            assert table[at // size - skipped] == part.block_table[at // size]
        assert not any(table[-(-length // size) :])
        for at, token_id in enumerate(part.tokens, part.start):
            if part.virtual is not None and token_id >= VOCABULARY:
                virtual_rows[token] = row_of(part.virtual, token_id - VOCABULARY)
                token_id = 0
            assert (arrays.token_ids[token], arrays.positions[token]) == (token_id, at)
            assert arrays.slots[token] == part.block_table[at // size] * size + at % size
            token += 1
        # First for the prompt's log-probabilities, then for each range of tensors; a token may be in several ranges.
        scored = [(part.scored.start, len(part.scored.tokens))] if part.scored else []
        for first, count in [*scored, *((each.start, each.count) for each in part.kept)]:
            kept_tokens += [token - len(part.tokens) + at - part.start for at in range(first, first + count)]
        if part.follows is not None:
            followed.append((token - 1, part.follows))
        if part.draws:
            rows.append(token - 1)
            for _ in part.draws:
                assert work.rows[draw] == row
                if part.follows is not None:
                    draw_follows[draw] = part.follows
                draw += 1
            row += 1
    assert arrays.query_start[-1] == token == len(arrays.token_ids)
    assert rows == (list(range(token)) if arrays.last_tokens is None else arrays.last_tokens.tolist())
    assert list(zip(arrays.follow_tokens.tolist(), arrays.follow_draws.tolist(), strict=True)) == followed
    assert kept_tokens == ([] if arrays.kept_tokens is None else arrays.kept_tokens.tolist())
    check_rows(arrays, virtual_rows)
    assert work.draws == [each for part in slices for each in part.draws]
    assert (work.num_rows, work.follows) == (row, draw_follows)
    assert arrays.max_query == max(len(part.tokens) for part in slices)
    assert arrays.generation_rows == len(list(takewhile(lambda part: len(part.tokens) == 1, slices)))
    assert arrays.max_context == arrays.context_lengths.max()
    types = {array.dtype for array in (arrays.block_tables, arrays.query_start, arrays.context_lengths)}
    assert types == {np.dtype(np.int32)}
    types = {array.dtype for array in (arrays.token_ids, arrays.positions, arrays.slots, arrays.follow_tokens)}
    assert types == {np.dtype(np.int64)}


@given(count=st.integers(1, 9), num_padding=st.integers(0, 5))
def test_padding(count, num_padding):
    """Rows without context that are stored nowhere follow the real rows, which are unchanged."""
    arrays = build_arrays([Slice([7], 5 + i, [9, 8, 3 + i, 2], (draw(0),)) for i in range(count)], 4, None)
    padded = GenerationBuffers(20, 4, 4, torch.device("cpu")).pad(arrays, count + num_padding)
    for name in ("token_ids", "positions", "slots", "block_tables", "context_lengths"):
        array, original = getattr(padded, name), getattr(arrays, name)
        assert array.dtype == original.dtype
        np.testing.assert_array_equal(array[:count], original)
        np.testing.assert_array_equal(array[count:], -1 if name == "slots" else 0)
        assert len(array) == count + num_padding
    assert padded.query_start.tolist() == list(range(count + num_padding + 1))
    assert (padded.generation_rows, padded.max_query, padded.last_tokens) == (count + num_padding, 1, None)


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=5), rows=st.integers(0, 3), more=st.integers(0, 5))
def test_padding_of_a_step_with_context(counts, rows, more):
    """Tokens of no sequence, and sequences without tokens, follow the real ones."""
    arrays = build_arrays([Slice([7] * n, 5 + i, [9, 8, 3 + i, 2, 1], ()) for i, n in enumerate(counts)], 4, None)
    total = sum(counts)
    padded = ContextBuffers(100, len(counts) + rows, 4, 4, torch.device("cpu")).pad(arrays, total + more)
    # A graph has no more sequences than tokens.
    size = min(len(counts) + rows, total + more)
    rows = size - len(counts)
    for name in ("token_ids", "positions", "slots"):
        assert getattr(padded, name).tolist() == getattr(arrays, name).tolist() + more * [-1 if name == "slots" else 0]
    assert padded.block_tables[: len(counts)].tolist() == arrays.block_tables.tolist()
    assert padded.block_tables.shape[0] == size
    assert padded.query_start.tolist() == [*arrays.query_start.tolist(), *rows * [total]]
    assert padded.context_lengths.tolist() == [*arrays.context_lengths.tolist(), *rows * [0]]
    assert {padded.query_start.dtype, padded.context_lengths.dtype} == {np.dtype(np.int32)}


def positions_of(*slices: Slice) -> list:
    return build_arrays(slices, 4, None, axes=True).positions.tolist()


def test_positions_of_models_with_axes():
    """An image of two lines of three rows is at index 1; text after it is three positions lower."""
    blocks, placed = list(range(4)), Positions([PlacedGrid(1, 6, 3)])
    plain = Slice([7, 8], 2, blocks)
    behind = Slice([7, 8], 9, blocks, positions=placed)
    within = Slice([7, 8, 9], 5, blocks, positions=placed)
    assert positions_of(plain, plain) == [2, 3, 2, 3]
    assert positions_of(plain, behind) == [2, 3, 6, 7]
    assert positions_of(Slice([7], 9, blocks, positions=placed), Slice([7], 9, blocks)) == [6, 9]
    assert positions_of(behind, within, plain) == [
        [6, 7, 1, 1, 4, 2, 3],
        [6, 7, 2, 2, 4, 2, 3],
        [6, 7, 2, 3, 4, 2, 3],
    ]
    # The slots of keys and values do not depend on the positions.
    arrays = [build_arrays((part,), 4, None, axes=True) for part in (behind, Slice([7, 8], 9, blocks))]
    assert arrays[0].slots.tolist() == arrays[1].slots.tolist()
    assert arrays[0].context_lengths.tolist() == arrays[1].context_lengths.tolist()
