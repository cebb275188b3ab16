from engine_worker.runner.batch import build
from engine_worker.step import Draw, Slice
from sluice.ring.params import SamplingParams


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
    )
    assert work.arrays.token_ids.tolist() == [7, 8, 9, 4, 6]
    assert work.arrays.positions.tolist() == [3, 4, 5, 0, 8]
    assert work.arrays.slots.tolist() == [23, 8, 9, 4, 28]
    assert work.arrays.block_tables.tolist() == [[5, 2, 0], [1, 0, 0], [9, 8, 7]]
    assert work.arrays.query_start.tolist() == [0, 3, 4, 5]
    assert work.arrays.context_lengths.tolist() == [6, 1, 9]
    assert (work.arrays.max_query, work.arrays.max_context) == (3, 9)
    assert work.arrays.last_tokens.tolist() == [2, 4]
    assert work.draws == [one, two, three]
    assert work.draw_rows == [0, 0, 1]


def test_generation_needs_all_rows():
    work = build((Slice([4], 5, [1, 2], (draw(0),)), Slice([6], 0, [3], (draw(0),))), 4, None)
    assert work.arrays.positions.tolist() == [5, 0]
    assert work.arrays.slots.tolist() == [9, 12]
    assert work.arrays.last_tokens is None
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
    )
    assert work.arrays.positions.tolist() == [21, 22, 3, 9, 10, 11, 12, 13]
    assert work.arrays.slots.tolist() == [9, 10, 7, 33, 34, 35, 28, 29]
    assert work.arrays.block_tables.tolist() == [[5, 2, 0], [1, 0, 0], [9, 8, 7]]
    assert work.arrays.context_lengths.tolist() == [7, 4, 10]
    assert (work.arrays.max_query, work.arrays.max_context) == (5, 10)
