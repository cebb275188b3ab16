"""The tokens that pass the filters, compared with transformers' warpers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.runner.batch import to_device
from engine_worker.sampling import choose
from engine_worker.sampling.filters import Filters, keep
from sluice.wire.params import SamplingParams
from tests.engine_worker.sampling.draws import draw, filtered
from tests.engine_worker.sampling.test_distribution import warped
from tests.examples import examples


def passing(logits: torch.Tensor, params: SamplingParams, candidates: int) -> set[int] | None:
    """Ids that pass among `candidates` tokens of the vocabulary; None if more candidates are needed."""
    values, ids = logits.topk(candidates)
    scaled = (values / params.temperature)[None]
    mass = (logits / params.temperature - scaled[0, 0]).exp().sum().double().view(1, 1)
    limits = to_device(Filters.of([params]), logits.device)
    passed, needs_more = keep(scaled, limits, mass, whole=candidates == len(logits))
    return None if needs_more.item() else set(ids[passed[0]].tolist())


@examples(200)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 15, 16, 17, 120]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_the_same_tokens_pass_as_in_transformers(seed, temperature, top_k, top_p, min_p):
    logits = torch.randn(120, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = warped(logits[None].clone(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = set(probabilities[0].nonzero().view(-1).tolist())
    assert passing(logits, params, 120) == expected
    few = passing(logits, params, 16)
    assert few is None or few == expected
    if len(expected) < 16 and top_k < 16:
        assert few is not None


def test_equal_tokens_pass_or_fail_together():
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert passing(logits, SamplingParams(top_k=2), 5) == {1, 2, 3}
    assert passing(logits, SamplingParams(top_k=2), 3) is None
    assert passing(logits, SamplingParams(top_p=0.3), 5) == {1, 2, 3}


def test_a_wide_nucleus_widens_only_its_row(monkeypatch):
    """Rows for which few candidates suffice are not computed again, and every row gets the token that it gets alone."""
    monkeypatch.setattr(choose, "CANDIDATES", 16)
    random = torch.Generator().manual_seed(3)
    scores = torch.stack((torch.randn(5000, generator=random) * 8, torch.randn(5000, generator=random) * 0.1))
    widths = []
    original = torch.Tensor.topk

    def topk(self, k, **kwargs):
        widths.append((len(self), k))
        return original(self, k, **kwargs)

    monkeypatch.setattr(torch.Tensor, "topk", topk)
    draws = [draw(seed=1, top_p=0.9), draw(seed=2, top_p=0.9)]
    tokens, valid, *_ = filtered(scores, draws)
    assert valid.all()
    assert widths == [(2, 16), (1, 256), (1, 4096), (1, 5000)]
    for i in range(2):
        assert filtered(scores[i : i + 1], draws[i : i + 1])[0].item() == tokens[i]


def test_fewer_tokens_than_top_k():
    """If bans leave fewer than top_k tokens, no more candidates are needed."""
    logits = torch.full((120,), -torch.inf)
    logits[:3] = torch.tensor([2.0, 1.0, 0.0])
    passed = passing(logits, SamplingParams(top_k=5, top_p=0.9), 16)
    assert passed is not None
    assert {0, 1} <= passed
    assert filtered(logits[None], [draw(top_k=5)])[0].item() < 3
