"""How the fields of a request are translated for the ring."""

import base64
import json

import pytest
from google.rpc.error_details_pb2 import BadRequest
from grpc import StatusCode

from sluice.v1 import generation_pb2 as pb
from tests.fakes.failures import Failure

USER = [{"role": "user", "content": "hi"}]


async def translated(gateway, script, path="/v1/completions", **fields) -> pb.GenerationSpec:
    prompt = {"messages": USER} if "chat" in path else {"prompt": "x"}
    answer = await gateway.post(path, **prompt, **fields)
    assert answer.status_code == 200, answer.text
    return script.seen[-1].spec


BOTH = {
    "temperature": (0.5, lambda spec: spec.sampling.temperature == 0.5),
    "top_p": (0.5, lambda spec: spec.sampling.top_p == 0.5),
    "top_k": (-1, lambda spec: spec.sampling.top_k == 0 and spec.sampling.HasField("top_k")),
    "min_p": (0.5, lambda spec: spec.sampling.min_p == 0.5),
    "repetition_penalty": (1.5, lambda spec: spec.sampling.repetition_penalty == 1.5),
    "presence_penalty": (1.5, lambda spec: spec.sampling.presence_penalty == 1.5),
    "frequency_penalty": (1.5, lambda spec: spec.sampling.frequency_penalty == 1.5),
    "logit_bias": ({"5": 1}, lambda spec: dict(spec.sampling.logit_bias) == {5: 1.0}),
    "bad_words": (["a"], lambda spec: list(spec.sampling.bad_words) == ["a"]),
    "allowed_token_ids": ([1, 2], lambda spec: list(spec.sampling.allowed_token_ids) == [1, 2]),
    "seed": (-1, lambda spec: spec.sampling.seed == 2**64 - 1),
    "n": (1, lambda spec: spec.n == 1),
    "max_tokens": (7, lambda spec: spec.stopping.max_tokens == 7),
    "min_tokens": (7, lambda spec: spec.stopping.min_tokens == 7),
    "stop": ("ab", lambda spec: list(spec.stopping.stop) == ["ab"]),
    "stop_token_ids": ([5], lambda spec: list(spec.stopping.stop_token_ids) == [5]),
    "ignore_eos": (True, lambda spec: spec.stopping.ignore_eos),
    "include_stop_str_in_output": (True, lambda spec: spec.stopping.include_stop_in_output),
    "skip_special_tokens": (False, lambda spec: not spec.output.skip_special_tokens),
    "add_special_tokens": (False, lambda spec: not spec.add_special_tokens),
    "truncate_prompt_tokens": (9, lambda spec: spec.truncate_prompt_tokens == 9),
    "priority": (-3, lambda spec: spec.priority == pb.PRIORITY_HIGH),
    "cache_salt": ("s", lambda spec: spec.kv_cache.salt == "s"),
    "model": ("tiny", lambda spec: spec.model == "tiny"),
    "response_format": ({"type": "json_object"}, lambda spec: spec.guided.HasField("json_object")),
    "guided_json": ({"type": "null"}, lambda spec: json.loads(spec.guided.json_schema) == {"type": "null"}),
    "guided_regex": ("a+", lambda spec: spec.guided.regex == "a+"),
    "guided_choice": (["a", "b"], lambda spec: list(spec.guided.choice.choices) == ["a", "b"]),
    "guided_grammar": ("start: A", lambda spec: spec.guided.ebnf == "start: A"),
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", BOTH)
async def test_fields_of_both_endpoints(gateway, script, path, name):
    value, holds = BOTH[name]
    assert holds(await translated(gateway, script, path, **{name: value}))


async def test_defaults_of_a_completion(gateway, script):
    spec = await translated(gateway, script, logprobs=3, echo=True, max_tokens=None)
    assert (spec.output.logprobs, spec.output.prompt_logprobs, spec.output.echo) == (3, 3, True)
    assert spec.stopping.max_tokens == 16
    assert (await translated(gateway, script)).stopping.max_tokens == 16
    assert not (await translated(gateway, script, echo=True)).output.HasField("prompt_logprobs")
    assert (await translated(gateway, script, prompt_logprobs=2)).output.prompt_logprobs == 2


async def test_fields_of_a_chat(gateway, script):
    path = "/v1/chat/completions"
    spec = await translated(
        gateway,
        script,
        path,
        max_completion_tokens=5,
        max_tokens=9,
        logprobs=True,
        top_logprobs=2,
        continue_final_message=True,
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        verbosity="high",
    )
    assert (spec.stopping.max_tokens, spec.output.logprobs, spec.chat.continue_final_message) == (5, 2, True)
    assert dict(spec.chat.template_kwargs) == {
        "enable_thinking": False,
        "add_generation_prompt": False,
        "reasoning_effort": "low",
        "verbosity": "high",
    }
    assert (await translated(gateway, script, path, logprobs=True)).output.logprobs == 0
    assert not (await translated(gateway, script, path, logprobs=False)).output.HasField("logprobs")


async def test_messages(gateway, script):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    answer = await gateway.post("/v1/chat/completions", messages=messages)
    assert answer.status_code == 200, answer.text
    system, user, assistant, tool = script.seen[-1].spec.chat.messages
    assert (system.role, system.content) == ("system", "a\nb")
    assert (user.content, user.name) == ("c", "ann")
    assert (assistant.content, assistant.reasoning_content) == ("", "hm")
    assert [(tool_call.id, tool_call.name, tool_call.arguments_json) for tool_call in assistant.tool_calls] == [
        ("c1", "f", '{"a": 1}')
    ]
    assert (tool.role, tool.tool_call_id) == ("tool", "c1")


async def test_images_among_the_parts(gateway, script):
    url = f"data:image/png;base64,{base64.b64encode(b'picture').decode()}"
    content = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}, {"type": "text", "text": "What?"}]
    answer = await gateway.post("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert answer.status_code == 200, answer.text
    (message,) = script.seen[-1].spec.chat.messages
    image, text = message.parts
    assert (image.image.data, text.text, message.content) == (b"picture", "What?", "")


async def test_an_image_that_the_ring_refuses_is_named_by_its_http_field(gateway, script):
    violation = BadRequest.FieldViolation(field="spec.chat.messages[0].parts[1].image.data", description="is truncated")
    script.failure = Failure(StatusCode.INVALID_ARGUMENT, "broken", (BadRequest(field_violations=[violation]),))
    answer = await gateway.post("/v1/chat/completions", messages=USER)
    assert answer.json()["error"]["param"] == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard"}, "messages[1].role"),
        ({"role": "user", "content": 7}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0].image_url"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio", "text": "a"}]}, "messages[1].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}]},
            "messages[1].content[0].image_url.url",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,a!"}}]},
            "messages[1].content[0].image_url.url",
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]},
            "messages[1].tool_calls[0].function",
        ),
    ],
)
async def test_invalid_messages(gateway, script, message, param):
    answer = await gateway.post("/v1/chat/completions", messages=[*USER, message])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not script.seen


STRUCTURED = {
    "json": ({"type": "null"}, "json_schema"),
    "json_object": (True, "json_object"),
    "regex": ("a", "regex"),
    "choice": (["a"], "choice"),
    "grammar": ("start: A", "ebnf"),
    "structural_tag": ({"structures": [], "triggers": []}, "structural_tag"),
}


@pytest.mark.parametrize("name", STRUCTURED)
async def test_structured_outputs(gateway, script, name):
    value, kind = STRUCTURED[name]
    spec = await translated(gateway, script, structured_outputs={name: value})
    assert spec.guided.WhichOneof("guide") == kind


async def test_formats(gateway, script):
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    spec = await translated(gateway, script, response_format=form)
    assert list(json.loads(spec.guided.json_schema)["properties"]) == ["z", "a"]
    form = {"type": "structural_tag", "structures": [{"begin": "<a>"}], "triggers": ["<"]}
    spec = await translated(gateway, script, response_format=form)
    assert json.loads(spec.guided.structural_tag) == {"structures": [{"begin": "<a>"}], "triggers": ["<"]}
    assert not (await translated(gateway, script, response_format={"type": "text"})).HasField("guided")
    assert (await translated(gateway, script, guided_json='{"type": "null"}')).guided.json_schema == '{"type": "null"}'


SCHEMA = {"type": "null"}
DIALECTS = [
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema"),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, "json_schema"),
    ({"response_format": {"type": "json_object", "schema": None}}, "json_object"),
    ({"response_format": {"type": "json", "value": SCHEMA}}, "json_schema"),
    ({"response_format": {"type": "json", "schema": SCHEMA}}, "json_schema"),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema"),
    ({"response_format": {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}}, "json_schema"),
    ({"response_format": {"type": "regex", "pattern": "a"}}, "regex"),
    ({"response_format": {"type": "regex", "value": "a"}}, "regex"),
    ({"response_format": {"type": "regex", "regex": "a"}}, "regex"),
    ({"response_format": {"type": "grammar", "grammar": "root ::= A"}}, "ebnf"),
    ({"response_format": {"type": "ebnf", "ebnf": "root ::= A"}}, "ebnf"),
    ({"guided_decoding": {"json": SCHEMA, "backend": "outlines"}}, "json_schema"),
    ({"guided_decoding": {"regex": "a", "disable_any_whitespace": False}}, "regex"),
    ({"json_schema": SCHEMA}, "json_schema"),
    ({"json_schema": '{"type": "null"}'}, "json_schema"),
    ({"regex": "a"}, "regex"),
    ({"ebnf": "root ::= A"}, "ebnf"),
    ({"grammar": "root ::= A"}, "ebnf"),
    ({"grammar": {"type": "json", "value": SCHEMA}}, "json_schema"),
    ({"grammar": {"type": "regex", "value": "a"}}, "regex"),
    ({"structural_tag": '{"structures": [], "triggers": []}'}, "structural_tag"),
]


@pytest.mark.parametrize(("fields", "kind"), DIALECTS)
async def test_constraints_of_other_servers(gateway, script, fields, kind):
    guided = (await translated(gateway, script, **fields)).guided
    assert guided.WhichOneof("guide") == kind
    expected = {"regex": "a", "ebnf": "root ::= A"}
    if kind == "json_schema":
        assert json.loads(guided.json_schema) == SCHEMA
    elif kind in expected:
        assert getattr(guided, kind) == expected[kind]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object", "shema": SCHEMA}}, "response_format.shema"),
        ({"response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
         "response_format.json_schema.x"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.triggers"),
        ({"response_format": {"type": "regex", "value": {}}}, "response_format.value"),
        ({"response_format": {"schema": SCHEMA}}, "response_format"),
        ({"structured_outputs": {"jsn": SCHEMA}}, "structured_outputs.jsn"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_decoding": {"choices": ["a"]}}, "guided_decoding.choices"),
        ({"grammar": {"type": "ebnf", "value": "a"}}, "grammar.type"),
        *(({name: "x"}, name) for name in (
            "guided_jsn", "guded_choice", "respnse_fromat", "responseFormat", "structured_output", "json_mode",
            "output_format", "gbnf", "nvext", "grammar_lazy", "guided_whitespace_pattern", "guided_decoding_guide",
            "constraints",
        )),
    ],
)  # fmt: skip
async def test_constraints_that_are_not_understood_are_refused_by_name(gateway, script, fields, param):
    for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": USER})):
        answer = await gateway.post(path, **prompt, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not script.seen


async def test_too_many_unknown_fields(gateway):
    answer = await gateway.post("/v1/completions", prompt="x", **{f"field{i}": 1 for i in range(65)})
    assert (answer.status_code, "65 unknown fields" in answer.text) == (400, True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_neutral_values_of_real_clients(gateway, script, path):
    plain = await translated(gateway, script, path)
    spec = await translated(
        gateway, script, path, model=None, top_logprobs=0, best_of=1, length_penalty=1.0, top_p=0, max_tokens=None
    )
    assert (spec.sampling.top_k, spec.sampling.HasField("top_p"), spec.HasField("best_of")) == (1, False, False)
    spec.ClearField("sampling")
    spec.request_id = plain.request_id
    assert spec.SerializeToString(deterministic=True) == plain.SerializeToString(deterministic=True)


async def test_truncation_to_the_context(gateway, script):
    spec = await translated(gateway, script, truncate_prompt_tokens=-1, max_tokens=24)
    assert spec.truncate_prompt_tokens == 1000
    spec = await translated(gateway, script, "/v1/chat/completions", truncate_prompt_tokens=-1)
    assert spec.truncate_prompt_tokens == 1023
    spec = await translated(gateway, script, max_completion_tokens=5, max_tokens=9)
    assert spec.stopping.max_tokens == 5


async def test_only_one_constraint_is_allowed(gateway):
    answer = await gateway.post("/v1/completions", prompt="x", guided_regex="a", guided_choice=["b"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_choice")
