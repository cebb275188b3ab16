"""Compares the figures of bench.precision with transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench import precision
from sluice import tiny_model

TEXTS = [[(31 * number + 7 * i) % 4000 for i in range(12)] for number in range(3)]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def runner():
    return precision.loaded(tiny_model.path(), precision.PRECISIONS[0], 1)


@torch.inference_mode()
def test_perplexity(model, runner, monkeypatch):
    monkeypatch.setattr(precision, "LENGTH", 12)
    tokens = torch.tensor(TEXTS)
    expected = model(tokens, labels=tokens).loss.exp().item()
    assert precision.perplexity(runner, TEXTS) == pytest.approx(expected, rel=1e-4)


@torch.inference_mode()
def test_greedy_tokens(model, runner, monkeypatch):
    monkeypatch.setattr(precision, "GENERATED", 4)
    tokens = torch.tensor(TEXTS)
    for _ in range(4):
        tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), dim=1)
    assert precision.greedy(runner, TEXTS) == tokens[:, -4:].tolist()
