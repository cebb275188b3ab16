"""Log-probabilities on a CPU agree with torch's, and are the same in every batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.cpu_kernels import RowThreads
from engine_worker.runner.forward import rows_per_block
from engine_worker.sampling import cpu_logprobs
from engine_worker.sampling.cpu_logprobs import GROUP, PART
from engine_worker.sampling.logprobs import compute_logprobs, torch_logprobs
from tests.examples import examples


@examples(100)
@given(
    seed=st.integers(0, 1 << 30),
    vocab=st.sampled_from([1, 15, 50, GROUP, 3 * GROUP, 20 * GROUP, 21 * GROUP, 40 * GROUP + 1, PART, PART + 7]),
    most=st.integers(0, 25),
    kinds=st.sampled_from([2, 30, 1 << 20]),
    rows=st.integers(1, 5),
)
def test_as_computed_by_torch(seed, vocab, most, kinds, rows):
    """`kinds`: number of distinct logits; if it is small, many logits are equal. Some are -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(kinds, (rows, vocab), generator=generator).float() / kinds * 100 - 60
    logits[torch.rand(rows, vocab, generator=generator) < 0.2] = -torch.inf
    logits[:, 0] = 1.0
    tokens = torch.randint(vocab, (rows,), generator=generator)
    actual, right = compute_logprobs(logits.clone(), tokens, most), torch_logprobs(logits, tokens, most)
    assert torch.equal(actual.ranks, right.ranks)
    torch.testing.assert_close(actual.chosen, right.chosen, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(actual.best, right.best, rtol=1e-6, atol=1e-5)
    assert torch.equal(logits.gather(1, actual.ids), logits.gather(1, right.ids))
    assert all(len(set(row)) == min(most, vocab) for row in actual.ids.tolist())


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_its_batch(monkeypatch, rows, threads):
    """The results have the same bits, with the same or another number of alternatives."""
    threads = RowThreads(threads)
    monkeypatch.setattr(cpu_logprobs, "ONE_THREAD", 0)
    monkeypatch.setattr(cpu_logprobs, "_threads", lambda: threads)
    generator = torch.Generator().manual_seed(4)
    logits = 5 * torch.randn(16, PART + 3 * GROUP + 1, generator=generator)
    tokens = torch.randint(logits.shape[1], (16,), generator=generator)
    together = compute_logprobs(logits, tokens, 20)
    parts = [compute_logprobs(*part, 20) for part in zip(logits.split(rows), tokens.split(rows), strict=True)]
    for column, alone in zip(together, zip(*parts, strict=True), strict=True):
        assert torch.equal(column, torch.cat(alone))
    fewer = compute_logprobs(logits, tokens, 3)
    assert torch.equal(fewer.chosen, together.chosen)
    assert torch.equal(fewer.best, together.best[:, :3])


@pytest.mark.parametrize("size", [1, 1000, 150_000])
def test_as_in_float64(size):
    """For certain, likely and impossible tokens."""
    logits = torch.linspace(-300, 20, size).repeat(2, 1)
    logits[1] = torch.linspace(-3, 2, size)
    right = logits.double().log_softmax(1)
    for token in {0, size // 2, size - 1}:
        logprobs = compute_logprobs(logits, torch.full((2,), token), 0).chosen
        torch.testing.assert_close(logprobs, right[:, token].float(), rtol=3e-7, atol=3e-6)


@pytest.mark.parametrize("step", [1, 7, GROUP, 40])
def test_the_largest_logits_at_any_index(step):
    """All in one group, or each in a different group."""
    logits = torch.zeros(1, 40 * GROUP)
    right = [(i * step + step // 2) % logits.shape[1] for i in range(10)]
    logits[0, right] = torch.arange(10, 0, -1.0)
    assert compute_logprobs(logits, torch.tensor([0]), 10).ids.tolist() == [right]


def test_ties_are_in_the_order_of_ids():
    logits = torch.zeros(2, 40 * GROUP)
    logits[1] = -1.0
    logits[1, [500, 3, 77]] = torch.tensor([2.0, 2.0, 3.0])
    logits[0, [9, 400, 21]] = 1.0
    assert compute_logprobs(logits, torch.zeros(2, dtype=torch.int64), 3).ids.tolist() == [[9, 21, 400], [77, 3, 500]]


@pytest.mark.parametrize("value", [0.0, torch.nan, -torch.inf, torch.inf])
def test_rows_without_a_bound(value):
    """All logits equal or not finite, next to an ordinary row."""
    logits = torch.randn(2, 40 * GROUP, generator=torch.Generator().manual_seed(2))
    logits[1] = value
    logprobs = compute_logprobs(logits, torch.zeros(2, dtype=torch.int64), 10)
    assert logprobs.ids[0].tolist() == logits[0].topk(10).indices.tolist()
    assert logprobs.ids[1].tolist() == list(range(10))
    assert bool(logprobs.chosen[1].isnan()) == bool(logprobs.best[1].isnan().all()) == (value != 0)


@pytest.mark.parametrize("token", [0, 100])
def test_a_row_with_nan(token):
    """The row's log-probabilities are NaN; its alternatives are the other tokens."""
    logits = torch.arange(40.0 * GROUP).repeat(2, 1)
    logits[0, token] = torch.nan
    logprobs = compute_logprobs(logits, torch.zeros(2, dtype=torch.int64), 5)
    assert logprobs.ids[0].tolist() == logprobs.ids[1].tolist()
    assert logprobs.chosen.isnan().tolist() == [True, False]


@pytest.mark.parametrize(("vocab", "rows"), [(1000, 1048), (4096, 256), (16384, 64), (151936, 64)])
def test_a_block_of_rows_is_bounded_in_bytes(vocab, rows):
    assert rows_per_block(vocab) == rows
