"""Draft tokens with logits from the caller, and when they apply."""

import math
from struct import pack

import numpy as np
import pytest
import torch

from engine_worker.speculative.proposals import Proposals, proposals_problem
from sluice.client.values import pack_draft_logits
from sluice.wire.params import BeamSearchParams, DraftLogits, SamplingParams, Speculation

VOCAB = 5
SAMPLING = SamplingParams()
TOKENS = (3, 1, 4)
ROWS = torch.arange(15.0).view(3, VOCAB) / 4


def speculation(rows=ROWS, tokens=TOKENS, threshold: float | None = None) -> Speculation:
    return Speculation(
        draft_token_ids=tokens, draft_logits=DraftLogits(**pack_draft_logits(rows)), acceptance_threshold=threshold
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_proposals_have_their_rows(dtype):
    proposals = Proposals.of(speculation(rows=ROWS.to(dtype), threshold=0.5), SAMPLING)
    for i, token in enumerate(TOKENS):
        for known in range(i + 1):
            proposal = proposals.after(TOKENS[:known], TOKENS[known:i])
            assert (proposal.token, proposal.threshold) == (token, 0.5)
            assert proposal.logits.dtype == np.float32
            assert proposal.logits.tolist() == ROWS[i].tolist()


def test_no_proposal_after_the_draft_or_a_difference():
    proposals = Proposals.of(speculation(), SAMPLING)
    assert proposals.after(TOKENS) is None
    assert proposals.after((*TOKENS, 0)) is None
    assert proposals.after((2,)) is None
    assert proposals.after((3, 2)) is None
    assert proposals.after((3,), (2,)) is None
    assert proposals.after((2,), (1,)) is None
    assert proposals.after((), (2,)) is None


def test_no_proposals_where_they_make_no_difference():
    assert Proposals.of(Speculation(draft_token_ids=TOKENS), SAMPLING) is None
    assert Proposals.of(speculation(), SamplingParams(temperature=0.0)) is None


def with_value(value: float, dtype: torch.dtype, *, everywhere: bool = False) -> torch.Tensor:
    rows = ROWS.clone()
    rows[1, slice(None) if everywhere else 2] = value
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.filterwarnings("error")
def test_rows_that_are_no_distribution(dtype):
    for broken in (
        with_value(math.nan, dtype),
        with_value(math.inf, dtype),
        with_value(-math.inf, dtype, everywhere=True),
        with_value(math.nan, dtype, everywhere=True),
    ):
        assert "row 1" in proposals_problem(speculation(rows=broken), SAMPLING, VOCAB)
    assert proposals_problem(speculation(rows=with_value(-math.inf, dtype)), SAMPLING, VOCAB) is None


def test_sizes():
    assert proposals_problem(speculation(), SAMPLING, VOCAB) is None
    problem = proposals_problem(speculation(), SAMPLING, VOCAB + 1)
    assert "has 60 bytes, must have 72: 6 logits in float32 for each of 3 draft tokens" in problem
    assert "must have 40" in proposals_problem(speculation(tokens=TOKENS[:2]), SAMPLING, VOCAB)
    assert "must have 0" in proposals_problem(speculation(tokens=()), SAMPLING, VOCAB)
    odd = Speculation(draft_token_ids=TOKENS, draft_logits=DraftLogits("float32", pack("<f", 1.0) + b"x"))
    assert "has 5 bytes" in proposals_problem(odd, SAMPLING, VOCAB)
    empty = Speculation(draft_token_ids=(), draft_logits=DraftLogits("float32", b""))
    assert "must have 0" in proposals_problem(empty, SAMPLING, VOCAB)


def test_beams():
    assert "beam search" in proposals_problem(speculation(), SamplingParams(beam_search=BeamSearchParams(2)), VOCAB)


def test_a_threshold_requires_logits():
    with pytest.raises(ValueError, match="requires draft_logits"):
        Speculation(acceptance_threshold=0.5)
