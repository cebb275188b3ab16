"""Log-probabilities of prompts, from blocks of logits."""

import pytest
import torch

from engine_worker.sampling.logprobs import PromptScores
from engine_worker.step import Scored, Slice
from sluice.wire.prompt_logprobs import unpack

VOCAB = 50


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_each_slice_gets_its_number_of_alternatives(rows):
    torch.manual_seed(1)
    logits = torch.randn(7, VOCAB)
    tops, tokens = (3, 0, 1), ((4, 5, 6), (7,), (8, 9, 10))
    slices = [Slice([0], 0, [0])]
    slices += [
        Slice([0, *scored_tokens], 0, [0], scored=Scored(0, scored_tokens, top))
        for scored_tokens, top in zip(tokens, tops, strict=True)
    ]
    scores = PromptScores(slices, torch.device("cpu"))
    for block in logits.split(rows):
        scores.add(block)
    scores.finish()
    right, at = logits.log_softmax(-1), 0
    for data, scored_tokens, top in zip(scores.collect(), tokens, tops, strict=True):
        for (logprob, rank, best), token in zip(unpack(data, top), scored_tokens, strict=True):
            row = right[at]
            assert logprob == pytest.approx(row[token].item(), abs=1e-5)
            assert rank == 1 + int((row > row[token]).sum())
            assert [id_ for id_, _ in best] == row.topk(top).indices.tolist()
            assert [value for _, value in best] == pytest.approx(row.topk(top).values.tolist(), abs=1e-5)
            at += 1
    assert at == 7


def test_ties_are_in_the_order_of_ids():
    scores = PromptScores([Slice([0, 1], 0, [0], scored=Scored(0, [1], 5))], torch.device("cpu"))
    scores.add(torch.zeros(1, 5))
    ((_, rank, best),) = unpack(scores.collect()[0], 5)
    assert rank == 1
    assert [id_ for id_, _ in best] == [0, 1, 2, 3, 4]
