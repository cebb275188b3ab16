"""The most likely tokens are those of a whole row, however they are found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.runner.forward import rows_per_block
from engine_worker.sampling.largest import GROUP
from engine_worker.sampling.logprobs import compute_logprobs
from tests.examples import examples


@examples(100)
@given(
    seed=st.integers(0, 1 << 30),
    vocab=st.sampled_from([1, 50, GROUP, 3 * GROUP, 20 * GROUP, 21 * GROUP, 40 * GROUP, 40 * GROUP + 1]),
    most=st.integers(0, 25),
    kinds=st.sampled_from([2, 30, 1 << 20]),
    rows=st.integers(1, 5),
)
def test_as_topk(seed, vocab, most, kinds, rows):
    """`kinds`: of logits; few of them are equal to many others. Some are -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(kinds, (rows, vocab), generator=generator).float() / kinds * 8
    logits[torch.rand(rows, vocab, generator=generator) < 0.2] = -torch.inf
    logits[:, 0] = 1.0
    tokens = torch.randint(vocab, (rows,), generator=generator)
    found, right = compute_logprobs(logits.clone(), tokens, most), logits.log_softmax(-1)
    most = min(most, vocab)
    assert torch.equal(found.best, right.topk(most).values)
    assert torch.equal(right.gather(1, found.ids), found.best)
    assert all(len(set(row)) == most for row in found.ids.tolist())


@pytest.mark.parametrize("step", [1, 7, GROUP, 40])
def test_the_largest_wherever_they_are(step):
    """All in one group, or each in another."""
    logits = torch.zeros(1, 40 * GROUP)
    right = [(i * step + step // 2) % logits.shape[1] for i in range(10)]
    logits[0, right] = torch.arange(10, 0, -1.0)
    assert compute_logprobs(logits, torch.tensor([0]), 10).ids.tolist() == [right]


def test_equal_ones_come_in_the_order_of_their_ids():
    logits = torch.zeros(2, 40 * GROUP)
    logits[1] = -1.0
    logits[1, [500, 3, 77]] = torch.tensor([2.0, 2.0, 3.0])
    logits[0, [9, 400, 21]] = 1.0
    assert compute_logprobs(logits, torch.zeros(2, dtype=torch.int64), 3).ids.tolist() == [[9, 21, 400], [77, 3, 500]]


@pytest.mark.parametrize("value", [0.0, torch.nan, -torch.inf])
def test_rows_without_a_bound(value):
    """All equal, or no number: as topk, beside a row that has one."""
    logits = torch.randn(2, 40 * GROUP, generator=torch.Generator().manual_seed(2))
    logits[1] = value
    found = compute_logprobs(logits, torch.zeros(2, dtype=torch.int64), 10).ids
    assert found[0].tolist() == logits[0].topk(10).indices.tolist()
    assert len(set(found[1].tolist())) == 10


@pytest.mark.parametrize(("vocab", "rows"), [(1000, 1048), (4096, 256), (16384, 64), (151936, 64)])
def test_a_block_of_rows_is_bounded_in_bytes(vocab, rows):
    assert rows_per_block(vocab) == rows
