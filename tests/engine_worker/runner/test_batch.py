import torch

from engine_worker.runner.batch import build
from engine_worker.step import Draw, Slice
from sluice.ring.params import SamplingParams

CPU = torch.device("cpu")


def draw(sequence: int) -> Draw:
    return Draw(SamplingParams(), sequence, 0, [], [])


def test_a_mixed_step():
    one, two, three = draw(0), draw(1), draw(2)
    work = build(
        (
            Slice([7, 8, 9], 3, [5, 2, 99], (one, two)),
            Slice([4], 0, [1]),
            Slice([6], 8, [9, 8, 7], (three,)),
        ),
        4,
        None,
        CPU,
    )
    assert work.token_ids.tolist() == [7, 8, 9, 4, 6]
    assert work.positions.tolist() == [3, 4, 5, 0, 8]
    assert work.attention.slots.tolist() == [23, 8, 9, 4, 28]
    assert work.attention.block_tables.tolist() == [[5, 2, 0], [1, 0, 0], [9, 8, 7]]
    assert work.attention.query_start.tolist() == [0, 3, 4, 5]
    assert work.attention.context_lengths.tolist() == [6, 1, 9]
    assert (work.attention.max_query, work.attention.max_context) == (3, 9)
    assert work.last_tokens.tolist() == [2, 4]
    assert work.draws == [one, two, three]
    assert work.draw_rows == [0, 0, 1]


def test_generation_needs_all_rows():
    work = build((Slice([4], 5, [1, 2], (draw(0),)), Slice([6], 0, [3], (draw(0),))), 4, None, CPU)
    assert work.positions.tolist() == [5, 0]
    assert work.attention.slots.tolist() == [9, 12]
    assert work.last_tokens is None
    assert work.draw_rows == [0, 1]


def test_tables_begin_where_the_widest_window_does():
    gone = 1 << 24
    work = build(
        (
            Slice([7, 8], 21, [gone, gone, gone, gone, 5, 2], (draw(0),)),
            Slice([4], 3, [1], (draw(0),)),
            Slice([6, 6, 6, 6, 6], 9, [gone, 9, 8, 7], (draw(0),)),
        ),
        4,
        6,
        CPU,
    )
    assert work.positions.tolist() == [21, 22, 3, 9, 10, 11, 12, 13]
    assert work.attention.slots.tolist() == [9, 10, 7, 33, 34, 35, 28, 29]
    assert work.attention.block_tables.tolist() == [[5, 2, 0], [1, 0, 0], [9, 8, 7]]
    assert work.attention.context_lengths.tolist() == [7, 4, 10]
    assert (work.attention.max_query, work.attention.max_context) == (5, 10)
