import dataclasses

import pytest

from router.parse.model import describe
from sluice.checkpoint.errors import CheckpointError
from sluice.settings.services import RouterSettings
from sluice.wire.params import SamplingParams


def defaults(checkpoint, **generation):
    return describe(dataclasses.replace(checkpoint, generation=generation)).sampling


def test_defaults_of_generation_config(checkpoint):
    sampling = defaults(checkpoint, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5)
    assert sampling == SamplingParams(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5)


def test_documented_defaults_without_generation_config(checkpoint):
    assert defaults(checkpoint) == SamplingParams(temperature=1.0, top_k=0, top_p=1.0)


def test_do_sample_false_makes_greedy_the_default(checkpoint):
    sampling = defaults(checkpoint, do_sample=False, temperature=0.5, top_k=7)
    assert (sampling.temperature, sampling.top_k) == (0.0, 7)
    assert defaults(checkpoint, do_sample=True, temperature=0.5).temperature == 0.5


def test_the_routers_defaults_precede_those_of_the_model(checkpoint):
    generation = {"temperature": 0.5, "top_p": 0.25, "do_sample": False}
    own = {"temperature": 0.75, "top_k": 7.0}
    sampling = describe(dataclasses.replace(checkpoint, generation=generation), own).sampling
    assert sampling == SamplingParams(temperature=0.75, top_p=0.25, top_k=7)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"temprature": 1}, "'temprature' must be one of temperature, top_p"),
        ({"temperature": 3}, r"temperature is 3, must be in \[0, 2\]"),
        ({"top_k": 1.5}, "top_k is 1.5, must be an integer of at least 0"),
    ],
)
def test_wrong_defaults_are_refused_as_settings(wrong, problem):
    with pytest.raises(ValueError, match=problem):
        RouterSettings(model="m", default_sampling=wrong)


def test_null_is_unset(checkpoint):
    assert defaults(checkpoint, temperature=None, top_k=None) == SamplingParams()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 3},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"top_k": 1.5},
    ],
)
def test_invalid_values_are_named(checkpoint, wrong):
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        defaults(checkpoint, **wrong)


def test_the_tokenizers_fingerprint_does_not_depend_on_the_weights(checkpoint, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint.path / name).read_bytes())
    copy = dataclasses.replace(checkpoint, path=tmp_path)
    assert describe(copy).tokenizer_fingerprint == describe(checkpoint).tokenizer_fingerprint
    (tmp_path / "tokenizer.json").write_text("{}")
    assert describe(copy).tokenizer_fingerprint != describe(checkpoint).tokenizer_fingerprint
