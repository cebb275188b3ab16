"""Errors for options and values that a request cannot hold: they name the field, the value and what is expected."""

import pytest

from sluice.client import InvalidRequest
from sluice.client.requests import build_spec


def test_an_unknown_option_suggests_the_closest() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'regex'; did you mean guided=\{'regex': ...\}\?"):
        build_spec("x", {"regex": "a"})
    with pytest.raises(TypeError, match=r"unknown option 'temprature'; did you mean 'temperature'\?"):
        build_spec("x", {"temprature": 1})
    with pytest.raises(TypeError, match=r"unknown option 'stop_strings'; did you mean 'stop'\?"):
        build_spec("x", {"stop_strings": ["a"]})
    with pytest.raises(TypeError, match=r"unknown option 'json_schema'; did you mean guided=\{'json_schema': ...\}\?"):
        build_spec("x", {"json_schema": {}})


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"top_k": -1}, "spec.sampling.top_k"),
        ({"seed": 2**64}, "spec.sampling.seed"),
        ({"max_tokens": 2**32}, "spec.stopping.max_tokens"),
        ({"stop": ["\ud800"]}, "spec.stopping.stop"),
        ({"priority": "urgent"}, "spec.priority"),
        ({"guided": {"rgx": "x"}}, "spec.guided"),
        ({"logit_bias": {-1: 0.5}}, "spec.sampling.logit_bias"),
        ({"kv_cache": {"prompt_retention": [{"begin": 1}]}}, "spec.kv_cache"),
        ({"kv_cache": {"decode_priority": -1}}, "spec.kv_cache"),
        ({"kv_cache": {"decode_duration": 1e30}}, "spec.kv_cache"),
        ({"time_limit": 1e30}, "spec.time_limit"),
    ],
)
def test_an_unencodable_value_names_its_field(options, path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_spec("x", options)
    assert [violation.field for violation in caught.value.violations] == [path]


@pytest.mark.parametrize(
    ("prompt", "path"),
    [
        ([-1], "spec.token_ids"),
        ([2**32], "spec.token_ids"),
        ("\ud800", "spec.text"),
        ([{"role": "user", "text": "x"}], "spec.chat"),
    ],
)
def test_unencodable_prompts(prompt, path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_spec(prompt, {})
    assert caught.value.violations[0].field == path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, "spec.sampling.temperature must be a number (got 'hot')"),
        ({"max_tokens": 1.5}, "spec.stopping.max_tokens must be an integer (got 1.5)"),
        ({"model": 5}, "spec.model must be a string (got 5)"),
        ({"token_ids": "yes"}, "spec.output.token_ids must be a bool (got 'yes')"),
        ({"stop": 1}, "spec.stopping.stop must be a list of strings (got 1)"),
        ({"stop": ["a", 3]}, "spec.stopping.stop[1] must be a string (got 3)"),
        ({"logit_bias": [1]}, "spec.sampling.logit_bias must be a mapping of integers to numbers (got [1])"),
        ({"logit_bias": {"5": 1}}, "each key of spec.sampling.logit_bias must be an integer (got '5')"),
        ({"logit_bias": {5: "a"}}, "spec.sampling.logit_bias[5] must be a number (got 'a')"),
        ({"kv_cache": 5}, "spec.kv_cache must be a mapping of fields of sluice.v1.KvCacheOptions (got 5)"),
        (
            {"kv_cache": {"prompt_retention": {"start": 0}}},
            "spec.kv_cache.prompt_retention must be a list of mappings of fields of sluice.v1.TokenRangeRetention "
            "(got {'start': 0})",
        ),
        (
            {"kv_cache": {"decode_duration": "long"}},
            "spec.kv_cache: decode_duration must be a number of seconds or a timedelta (got 'long')",
        ),
        ({"guided": {"json_schema": {1, 2}}}, "spec.guided.json_schema must be a string (got {1, 2})"),
        ({"guided": {"json_schema": {"enum": {1}}}}, "spec.guided: Object of type set is not JSON serializable"),
        ({"speculation": {"draft_logits": 5}}, "draft_logits must be an array or a mapping of dtype and data, not int"),
        ({"images": 5}, "spec.images must be a list of bytes, one value for each image (got 5)"),
        ({"images": b"png"}, "spec.images must be a list of bytes, one value for each image (got b'png')"),
        ({"images": ["path.png"]}, "spec.images[0].data must be bytes (got 'path.png')"),
        ({"tensors": ["x" * 999]}, "(got 'xxx"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_its_field_and_the_type(options, message) -> None:
    with pytest.raises(TypeError) as caught:
        build_spec("x", options)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_wrong_types_in_messages_of_a_chat() -> None:
    with pytest.raises(TypeError, match=r"spec\.chat\.messages\[1\]\.content must be a string \(got 5\)"):
        build_spec([{"role": "system", "content": "x"}, {"role": "user", "content": 5}], {})
    with pytest.raises(TypeError, match=r"spec\.token_ids\.ids\[1\] must be an integer \(got 'b'\)"):
        build_spec([1, "b"], {})


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]]])
def test_a_list_of_prompts_is_refused(prompts) -> None:
    with pytest.raises(TypeError, match=r"a call takes one prompt \(got a list of 2\); .*GenerationExecutor"):
        build_spec(prompts, {})


def test_a_tool_call_of_another_form_is_refused() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "add"}}
    with pytest.raises(InvalidRequest, match="ToolCall has no"):
        build_spec([{"role": "assistant", "tool_calls": [call]}], {})
