import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.attention.split import LONG_SPLITS, SPLITS, UNSPLIT, Split, plan_split

H100 = 132
KEYS = 64


@pytest.mark.parametrize(
    ("rows", "max_context", "split"),
    [
        (1, 40960, Split(33, 33)),
        (1, 600, Split(10, 10)),
        (1, 60, UNSPLIT),
        (8, 40960, Split(8, 4)),
        (33, 4096, UNSPLIT),
        (33, 4097, Split(2, 1)),
        (512, 40960, Split(8, 1)),
    ],
)
def test_splits_for_eight_kv_heads_on_a_large_gpu(rows, max_context, split):
    """A long context is split even if the batch keeps the GPU busy: otherwise the step would wait for its program."""
    assert plan_split(rows * 8, max_context, KEYS, H100) == split


@given(st.integers(1, 10000), st.integers(1, 1 << 20), st.sampled_from([16, 32, 64]), st.integers(1, 200))
def test_bounds(programs, max_context, keys, cores):
    most, busy = plan_split(programs, max_context, keys, cores)
    assert 1 <= busy <= most <= SPLITS
    assert most <= max(LONG_SPLITS, busy)
    assert busy == 1 or busy * programs <= 2 * cores
    assert busy <= -(-max_context // keys)
