"""Prompts and options set the right fields of the request."""

from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import pytest
import torch

from sluice.client import InvalidRequest, Options, embeddings_of
from sluice.client.requests import build_spec
from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import GuidedDecoding

PROMPT_AND_PARTS = {"text", "token_ids", "chat", "prompt_embeds", "sampling", "stopping", "output"}


class ModelOfPydantic:
    """The method of pydantic.BaseModel that gives a class's schema."""

    @classmethod
    def model_json_schema(cls) -> dict[str, str]:
        return {"type": "object"}


def test_every_field_of_the_contract_is_an_option() -> None:
    spec = pb.GenerationSpec.DESCRIPTOR.fields_by_name
    fields = set(spec) - PROMPT_AND_PARTS
    for part in ("sampling", "stopping", "output"):
        fields |= set(spec[part].message_type.fields_by_name)
    fields |= set(spec["chat"].message_type.fields_by_name) - {"messages"}
    assert fields == set(Options.__annotations__)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", pb.GenerationSpec(text="hi")),
        ("", pb.GenerationSpec(text="")),
        ([1, 2], pb.GenerationSpec(token_ids=pb.TokenIds(ids=[1, 2]))),
        ((), pb.GenerationSpec(token_ids=pb.TokenIds())),
        (
            [{"role": "user", "content": "hi"}],
            pb.GenerationSpec(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])),
        ),
        (
            [
                {"role": "system", "content": "brief"},
                {"role": "user", "content": [{"type": "image", "data": b"png"}, {"type": "text", "text": "hi"}]},
            ],
            pb.GenerationSpec(
                chat=pb.ChatPrompt(
                    messages=[
                        pb.ChatMessage(role="system", content="brief"),
                        pb.ChatMessage(
                            role="user",
                            parts=[pb.ContentPart(image=pb.Image(data=b"png")), pb.ContentPart(text="hi")],
                        ),
                    ]
                )
            ),
        ),
    ],
)
def test_prompts(prompt, expected) -> None:
    assert build_spec(prompt, {}) == expected


@pytest.mark.parametrize("prompt", [b"bytes", 5, None, {"role": "user", "content": "x"}, [1.5], ["a"]])
def test_wrong_prompt_type(prompt) -> None:
    with pytest.raises(TypeError):
        build_spec(prompt, {})


ROWS = [[0.5, -1.0], [2.0, 0.25], [1.0, 3.0]]


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (ROWS, "float32"),
        (torch.tensor(ROWS), "float32"),
        (torch.tensor(ROWS, dtype=torch.float16), "float16"),
        (torch.tensor(ROWS, dtype=torch.bfloat16, requires_grad=True), "bfloat16"),
        (torch.tensor(ROWS, dtype=torch.float64), "float32"),
        (torch.tensor(ROWS).T.contiguous().T, "float32"),
        (torch.tensor(ROWS, dtype=torch.bfloat16).T.contiguous().T, "bfloat16"),
        (np.array(ROWS, np.float16), "float16"),
        (np.array(ROWS, ">f4"), "float32"),
        (embeddings_of(ROWS), "float32"),
    ],
    ids=str,
)
def test_embeddings_from_tensors_arrays_and_lists(rows, dtype) -> None:
    as_prompt = build_spec({"prompt_embeds": rows}, {}).prompt_embeds
    as_table = build_spec("x", {"prompt_table": rows}).prompt_table.embeddings
    assert as_prompt == as_table
    assert (list(as_prompt.shape), as_prompt.dtype) == ([3, 2], dtype)
    values = torch.frombuffer(bytearray(as_prompt.data), dtype=getattr(torch, dtype))
    assert values.view(3, 2).tolist() == ROWS


def test_a_table_with_extra_ids() -> None:
    table = build_spec([4096, 5], {"prompt_table": {"embeddings": ROWS, "token_extra_ids": [7, 0]}}).prompt_table
    assert (list(table.token_extra_ids), list(table.embeddings.shape)) == ([7, 0], [3, 2])


@pytest.mark.parametrize("rows", ["text", 5, [[1.0], [1.0, 2.0]], {"shape": [1, 1]}, {"rows": 1}], ids=str)
def test_invalid_embeddings(rows) -> None:
    with pytest.raises(TypeError, match="embeddings"):
        build_spec({"prompt_embeds": rows}, {})


def test_options_set_fields_of_their_messages() -> None:
    spec = build_spec(
        "x",
        {
            "temperature": 0.0,
            "seed": 2**64 - 1,
            "logit_bias": {5: -1.5},
            "max_tokens": 9,
            "stop": "END",
            "n": 3,
            "token_ids": True,
            "logprobs": 0,
            "priority": "high",
            "time_limit": 1.5,
            "kv_cache": {"salt": "a", "decode_duration": timedelta(seconds=2)},
            "guided": {"choice": {"choices": ["yes", "no"]}},
            "resume": [{"index": 0, "token_ids": [1]}],
            "model": None,
        },
    )
    assert spec.sampling.HasField("temperature")
    assert spec.sampling.temperature == 0.0
    assert spec.sampling.seed == 2**64 - 1
    assert dict(spec.sampling.logit_bias) == {5: -1.5}
    assert spec.stopping.max_tokens == 9
    assert list(spec.stopping.stop) == ["END"]
    assert spec.n == 3
    assert spec.output.token_ids is True
    assert spec.output.HasField("logprobs")
    assert spec.priority == pb.PRIORITY_HIGH
    assert spec.time_limit.ToTimedelta() == timedelta(seconds=1.5)
    assert spec.kv_cache.salt == "a"
    assert spec.kv_cache.decode_duration.seconds == 2
    assert list(spec.guided.choice.choices) == ["yes", "no"]
    assert list(spec.resume[0].token_ids) == [1]
    assert spec.model == ""


def test_durations_in_mappings_are_in_seconds() -> None:
    spec = build_spec(
        "x",
        {
            "kv_cache": {
                "prompt_retention": [
                    {"start": 0, "end": 9, "priority": 100, "duration": 1.5},
                    {"start": 9, "end": None, "priority": 7, "duration": timedelta(minutes=1)},
                ],
                "decode_priority": 0,
                "decode_duration": 2,
                "salt": None,
            }
        },
    )
    assert spec.kv_cache == pb.KvCacheOptions(
        prompt_retention=[
            pb.TokenRangeRetention(start=0, end=9, priority=100, duration=timedelta(seconds=1.5)),
            pb.TokenRangeRetention(start=9, priority=7, duration=timedelta(minutes=1)),
        ],
        decode_priority=0,
        decode_duration=timedelta(seconds=2),
    )


def test_missing_options_are_unset() -> None:
    spec = build_spec("x", {"temperature": None, "stop": None})
    assert spec == pb.GenerationSpec(text="x")


def test_several_stops() -> None:
    assert list(build_spec("x", {"stop": ("a", "b")}).stopping.stop) == ["a", "b"]


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        ({"json_object": True}, {"json_object": {}}),
        ({"json_object": False, "regex": "a"}, {"regex": "a"}),
        ({"json_schema": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"json_schema": ModelOfPydantic}, {"json_schema": '{"type": "object"}'}),
        (ModelOfPydantic, {"json_schema": '{"type": "object"}'}),
        ({"structural_tag": {"triggers": ["<"]}}, {"structural_tag": '{"triggers": ["<"]}'}),
        ({"choice": ["yes", "no"]}, {"choice": {"choices": ["yes", "no"]}}),
    ],
)
def test_guides_in_python_form(guide, expected) -> None:
    assert build_spec("x", {"guided": guide}) == build_spec("x", {"guided": expected})
    assert build_spec("x", {"guided": guide}).guided == GuidedDecoding(**expected)


def test_chat_options_need_a_chat() -> None:
    chat = [{"role": "user", "content": "x"}]
    spec = build_spec(chat, {"continue_final_message": True, "template_kwargs": {"enable_thinking": False}})
    assert spec.chat.continue_final_message
    assert spec.chat.template_kwargs["enable_thinking"] is False
    with pytest.raises(TypeError, match="chat prompts only"):
        build_spec("x", {"continue_final_message": True})


@pytest.mark.parametrize("levels", [30, 31, 40, 3000])
def test_variables_that_are_nested_too_deeply_are_named(levels) -> None:
    """Protobuf would raise DecodeError, without the field."""
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    deep = pytest.raises(InvalidRequest, match=r"^spec\.chat\.template_kwargs: is nested more than 30 levels deep$")
    with nullcontext() if levels == 30 else deep:
        build_spec([{"role": "user", "content": "x"}], {"template_kwargs": value})


def test_images() -> None:
    assert build_spec("x", {"images": [b"a", b"b"]}).images == [pb.Image(data=b"a"), pb.Image(data=b"b")]
    for part in (
        {"type": "image", "url": "x"},
        {"type": "text", "data": b"x"},
        {"type": "audio", "data": b"x"},
        "text",
    ):
        with pytest.raises(TypeError, match="a part must be"):
            build_spec([{"role": "user", "content": [part]}], {})
    with pytest.raises(TypeError, match="images"):
        build_spec("x", {"images": ["path.png"]})


@pytest.mark.parametrize(
    "call",
    [
        {"id": "1", "name": "add", "arguments_json": '{"a": 1}'},
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "1", "function": {"name": "add", "arguments": {"a": 1}}},
    ],
)
def test_tool_calls_in_both_forms(call) -> None:
    spec = build_spec([{"role": "assistant", "content": None, "tool_calls": [call]}], {})
    (message,) = spec.chat.messages
    assert message.tool_calls == [pb.ToolCall(id="1", name="add", arguments_json='{"a": 1}')]
