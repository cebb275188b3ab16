"""Samples over many positions follow the exact distribution (chi-square test)."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.engine_worker.sampling.draws import draw, sampled

DRAWS = 6_000


def warped(logits: torch.Tensor, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Probabilities by transformers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(None, logits).softmax(dim=-1)


def counts(logits: torch.Tensor, **sampling) -> torch.Tensor:
    """Number of times that each token was sampled: one draw per position, all from one row of logits."""
    draws = [draw(seed=99, position=i, **sampling) for i in range(DRAWS)]
    drawn = sampled(logits[None], [0] * DRAWS, draws)
    return torch.bincount(torch.tensor([d.token for d in drawn]), minlength=len(logits))


def assert_follows(counts: torch.Tensor, expected: torch.Tensor) -> None:
    assert (counts[expected == 0] == 0).all()
    size = int(counts.sum())
    likely = expected * size >= 5
    parts = [counts[likely].double(), counts[~likely].sum()[None].double()]
    expected_parts = [expected[likely].double() * size, expected[~likely].sum()[None].double() * size]
    cells, expected_cells = torch.cat(parts), torch.cat(expected_parts)
    used = expected_cells >= 5
    statistic = ((cells - expected_cells) ** 2 / expected_cells.clamp(min=1e-9))[used].sum().item()
    freedom = int(used.sum()) - 1
    # Four standard deviations of chi-square: exceeded once in thirty thousand tests.
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 4


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"min_p": 0.1},
    {"top_k": 5},
    {"top_k": 290},
    {"top_p": 0.7},
    {"top_p": 0.999, "temperature": 3.0},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
]


@pytest.mark.quick(7)
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [40, 300])
def test_samples_follow_the_filtered_softmax(sampling, vocab):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    if sampling.get("top_k", 0) > vocab:
        sampling = sampling | {"top_k": vocab}
    assert_follows(counts(logits, **sampling), warped(logits[None].clone(), **sampling)[0])
