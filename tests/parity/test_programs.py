"""Greedy outputs under penalties, bans and n-gram rules equal those of transformers."""

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice.wire.params import SamplingParams
from tests.parity.conftest import greedy
from tests.parity.harness import EngineHarness

pytestmark = pytest.mark.one_model

MAX_TOKENS = 30
COUNT = 5
RULES = {
    "n-grams": {"no_repeat_ngram_size": 2},
    "no token twice": {"no_repeat_ngram_size": 1},
    "bad words": {},
    "penalty": {"repetition_penalty": 1.2},
    "all": {"no_repeat_ngram_size": 3, "repetition_penalty": 1.05},
}
ENGINES = {"plain": {}, "overlap": {"overlap": True}, "openvino": {"backend": "openvino"}}


@pytest.fixture(scope="module")
def model(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def undisturbed(model, prompts) -> list[list[int]]:
    return greedy(model, prompts[20 : 20 + COUNT], MAX_TOKENS)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("engine", "rule"),
    [
        (engine, rule)
        if (engine, rule) in {("openvino", "all"), ("plain", "all"), ("openvino", "n-grams")}
        else pytest.param(engine, rule, marks=pytest.mark.long)
        for engine, rule in product(ENGINES, RULES)
    ],
)
def test_rules_equal_transformers(model_folder, model, prompts, undisturbed, engine, rule):
    prompts, rules = prompts[20 : 20 + COUNT], dict(RULES[rule])
    for name, value in rules.items():
        setattr(model.generation_config, name, value)
    # Pairs and triples of tokens that occur without any rule.
    words = [output[i : i + 2 + i % 2] for output in undisturbed for i in range(3, MAX_TOKENS - 3, 7)]
    if rule in ("all", "bad words"):
        model.generation_config.bad_words_ids = words
        rules["bad_words"] = tuple(map(tuple, words))
    try:
        expected = greedy(model, prompts, MAX_TOKENS)
    finally:
        for name in (*rules, "bad_words_ids"):
            setattr(model.generation_config, name, None)
    assert expected != undisturbed
    harness = EngineHarness(model_folder, **ENGINES[engine])
    assert harness.generate(prompts, SamplingParams(temperature=0.0, **rules), MAX_TOKENS) == expected
