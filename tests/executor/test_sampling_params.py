"""`SamplingParams`, with TensorRT-LLM's names, set the right fields of a request."""

import json
from dataclasses import fields

import pytest

from sluice.client.requests import build_spec
from sluice.executor import AdditionalModelOutput, GenerationRequest, GuidedDecodingParams, SamplingParams
from sluice.v1 import generation_pb2 as pb

SAMPLING = {
    "max_tokens": 7,
    "min_tokens": 2,
    "end_id": 5,
    "ignore_eos": True,
    "stop": "x",
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "bad": ["y"],
    "bad_token_ids": [4],
    "allowed_token_ids": [6, 7],
    "embedding_bias": {1: 0.5},
    "logits_processor": "mine",
    "n": 2,
    "best_of": 3,
    "use_beam_search": True,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": 9,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "no_repeat_ngram_size": 2,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "return_context_logits": True,
    "return_generation_logits": True,
    "additional_model_outputs": [AdditionalModelOutput(name="hidden", gather_context=True)],
    "guided_decoding": GuidedDecodingParams(regex="a+"),
    "add_special_tokens": False,
    "truncate_prompt_tokens": 8,
    "skip_special_tokens": False,
    "stream_interval": 4,
}
"""A value other than the default for each field of SamplingParams that does not require another field."""


def spec(params: SamplingParams) -> pb.GenerationSpec:
    return build_spec("x", params.options())


@pytest.mark.parametrize("name", sorted({field.name for field in fields(SamplingParams)} - {"detokenize", "pad_id"}))
def test_no_sampling_parameter_is_dropped(name) -> None:
    if name in ("length_penalty", "early_stopping", "beam_search_diversity_rate"):
        plain = SamplingParams(use_beam_search=True, n=2)
        changed = SamplingParams(use_beam_search=True, n=2, **{name: 1})
    else:
        plain, changed = SamplingParams(), SamplingParams(**{name: SAMPLING[name]})
    assert spec(changed) != spec(plain)


def test_sampling_parameters_set_their_fields() -> None:
    message = spec(
        SamplingParams(
            max_tokens=9,
            stop=["a", "b"],
            stop_token_ids=[7],
            bad="no",
            embedding_bias={3: -1.5},
            include_stop_str_in_output=True,
            temperature=0.0,
            top_k=1,
            seed=0,
            logprobs=0,
            skip_special_tokens=False,
            guided_decoding=GuidedDecodingParams(json={"type": "object"}),
        )
    )
    assert message.stopping.max_tokens == 9
    assert list(message.stopping.stop) == ["a", "b"]
    assert list(message.stopping.stop_token_ids) == [7]
    assert message.stopping.include_stop_in_output
    assert list(message.sampling.bad_words) == ["no"]
    assert dict(message.sampling.logit_bias) == {3: -1.5}
    for name in ("temperature", "top_k", "seed"):
        assert message.sampling.HasField(name), name
    assert not message.sampling.HasField("top_p")
    assert message.output.HasField("logprobs")
    assert message.output.skip_special_tokens is False
    assert json.loads(message.guided.json_schema) == {"type": "object"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guided_decoding": {"json": "{}"}}, "guided_decoding must be a GuidedDecodingParams, not dict"),
        (
            {"additional_model_outputs": ["hidden"]},
            "additional_model_outputs: each value must be a AdditionalModelOutput, not str",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_at_once(options, message) -> None:
    with pytest.raises(TypeError, match=message):
        SamplingParams(**options)


class Answer:
    """Like a Pydantic model."""

    @classmethod
    def model_json_schema(cls) -> dict[str, str]:
        return {"title": "Answer"}


def test_a_guide_may_be_a_pydantic_model() -> None:
    assert GuidedDecodingParams(json=Answer).options() == {"json_schema": '{"title": "Answer"}'}


def test_an_unknown_parameter_names_what_to_write_in_its_place() -> None:
    for name, hint in {"max_token": "'max_tokens'", "stop_strings": "'stop'", "bad_words": "'bad'"}.items():
        with pytest.raises(TypeError, match=f"unknown option {name!r}; did you mean {hint}?"):
            SamplingParams(**{name: 9})
    with pytest.raises(TypeError, match=r"unknown option 'json_schema'; did you mean 'json'\?"):
        GuidedDecodingParams(json_schema={})
    with pytest.raises(
        TypeError, match=r"unknown option 'max_tokens'; did you mean SamplingParams\(max_tokens=...\)\?"
    ):
        GenerationRequest("x", max_tokens=9)


def test_guided_choice() -> None:
    message = spec(SamplingParams(guided_decoding=GuidedDecodingParams(choice=["yes", "no"])))
    assert list(message.guided.choice.choices) == ["yes", "no"]


def test_default_max_tokens() -> None:
    assert spec(SamplingParams()).stopping.max_tokens == 32
    assert not spec(SamplingParams(max_tokens=None)).stopping.HasField("max_tokens")


@pytest.mark.parametrize(
    ("options", "ignore_eos", "stops"),
    [
        ({}, False, []),
        ({"end_id": 5}, True, [5]),
        ({"end_id": 0, "stop_token_ids": [9]}, True, [9, 0]),
        ({"end_id": -1}, True, []),
        ({"end_id": 5, "ignore_eos": True, "stop_token_ids": [9]}, True, [9]),
    ],
)
def test_end_id_replaces_eos(options, ignore_eos, stops) -> None:
    stopping = spec(SamplingParams(**options)).stopping
    assert (stopping.ignore_eos, list(stopping.stop_token_ids)) == (ignore_eos, stops)


def test_beams_and_best_of() -> None:
    beams = spec(SamplingParams(use_beam_search=True, n=2, best_of=4, length_penalty=0.5, early_stopping=1))
    assert (beams.n, beams.HasField("best_of")) == (2, False)
    assert (beams.sampling.beam_search.width, beams.sampling.beam_search.length_penalty) == (4, 0.5)
    assert beams.sampling.beam_search.early_stopping is True
    assert beams.sampling.beam_search.exhaustive is False
    exhaustive = spec(SamplingParams(use_beam_search=True, n=2, early_stopping=2, beam_search_diversity_rate=0.5))
    assert exhaustive.sampling.beam_search.width == 2
    assert exhaustive.sampling.beam_search.exhaustive is True
    assert exhaustive.sampling.beam_search.early_stopping is False
    assert exhaustive.sampling.beam_search.diversity_rate == 0.5
    best = spec(SamplingParams(n=2, best_of=4))
    assert (best.n, best.best_of, best.sampling.HasField("beam_search")) == (2, 4, False)


@pytest.mark.parametrize("options", [{"n": 3, "best_of": 2}, {"length_penalty": 0.5}, {"early_stopping": True}])
def test_contradictory_options(options) -> None:
    with pytest.raises(ValueError, match=next(reversed(options))):
        SamplingParams(**options)


@pytest.mark.parametrize("guides", [{}, {"regex": "a", "grammar": "b"}])
def test_exactly_one_guide(guides) -> None:
    with pytest.raises(ValueError, match="exactly one of json"):
        GuidedDecodingParams(**guides)


def test_unknown_parameter() -> None:
    with pytest.raises(TypeError, match="top_p_decay"):
        SamplingParams(top_p_decay=0.5)
