"""How HTTP clients see errors of the ring, of the request and of the connection."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from gateway.requests import body
from tests.fakes.failures import Failure, bad_request
from tests.fakes.gateway import running

CODE = grpc.StatusCode
NAMED_G = {"type": "function", "function": {"name": "g"}}


def with_reason(code: grpc.StatusCode, reason: str, retry_after: float | None = None) -> Failure:
    details = [error_details_pb2.ErrorInfo(reason=reason, domain="sluice")]
    if retry_after is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(nanos=int(retry_after * 1e9))))
    return Failure(code, reason.lower(), tuple(details))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "kind", "code"),
    [
        (bad_request("spec.sampling.temperature", "is 3"), 400, "invalid_request_error", "invalid_argument"),
        (with_reason(CODE.UNIMPLEMENTED, "NOT_BUILT_YET"), 400, "invalid_request_error", "not_built_yet"),
        (with_reason(CODE.UNAUTHENTICATED, "UNAUTHENTICATED"), 401, "authentication_error", "unauthenticated"),
        (with_reason(CODE.PERMISSION_DENIED, "FORBIDDEN"), 403, "permission_error", "forbidden"),
        (with_reason(CODE.NOT_FOUND, "MODEL_NOT_FOUND"), 404, "not_found_error", "model_not_found"),
        (with_reason(CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST"), 409, "conflict_error", "duplicate_request"),
        (with_reason(CODE.RESOURCE_EXHAUSTED, "OVERLOADED", 0.5), 429, "rate_limit_error", "overloaded"),
        (with_reason(CODE.UNAVAILABLE, "NO_ENGINE", 0.5), 503, "server_error", "no_engine"),
        (with_reason(CODE.INTERNAL, "STEP_FAILED"), 503, "server_error", "step_failed"),
        (with_reason(CODE.INTERNAL, "POISON"), 503, "server_error", "poison"),
    ],
)
async def test_errors_by_class(gateway, script, failure, status, kind, code, streams):
    script.failure = failure
    answer = await gateway.post("/v1/completions", prompt="x", stream=streams)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (status, kind, code)
    assert ("retry-after" in answer.headers) is (status == 429 or code == "no_engine")
    if "retry-after" in answer.headers:
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "500")
    assert answer.headers.get("x-should-retry") == ("false" if code == "poison" else None)
    if status == 400 and code == "invalid_argument":
        assert error["param"] == "temperature"
        assert error["message"] == "temperature: is 3"


async def test_an_unknown_model_is_named_as_in_the_request(gateway, script):
    info = error_details_pb2.ErrorInfo(reason="MODEL_NOT_FOUND", domain="sluice")
    script.failure = Failure(CODE.NOT_FOUND, "spec.model is 'a'; the model served here is 'b'", (info,))
    error = (await gateway.post("/v1/completions", prompt="x")).json()["error"]
    assert error["message"] == "model is 'a'; the model served here is 'b'"
    assert error["param"] == "model"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("spec.chat.messages[2].role", "messages[2].role"),
        ("spec.chat", "messages"),
        ("spec.chat.messages[2].tool_calls[1].arguments_json", "messages[2].tool_calls[1].function.arguments"),
        ("spec.chat.messages[2].tool_calls[1].name", "messages[2].tool_calls[1].function.name"),
        ("spec.chat.tools_json", "tools"),
        ("spec.chat.template_kwargs.x", "chat_template_kwargs"),
        ("spec.stopping.include_stop_in_output", "include_stop_str_in_output"),
        ("spec.guided.json_schema", "guided_json"),
        ("spec.n", "n"),
    ],
)
async def test_errors_name_fields_as_in_the_http_api(gateway, script, field, param):
    script.failure = bad_request(field, "is wrong")
    answer = await gateway.post("/v1/completions", prompt="x", guided_json={})
    assert answer.json()["error"] == {
        "message": f"{param}: is wrong",
        "type": "invalid_request_error",
        "param": param,
        "code": "invalid_argument",
    }


@pytest.mark.parametrize(
    ("field", "param", "fields"),
    [
        ("spec.stopping.max_tokens", "max_completion_tokens", {"max_completion_tokens": 9}),
        ("spec.stopping.max_tokens", "max_tokens", {"max_tokens": 9}),
        ("spec.output.logprobs", "top_logprobs", {"logprobs": True, "top_logprobs": 99}),
        ("spec.kv_cache.salt", "cache_salt", {"cache_salt": "s"}),
        ("spec.chat.template_kwargs.verbosity", "verbosity", {"verbosity": "high"}),
        ("spec.chat.messages[1].tool_calls[0].arguments_json", "messages[1].tool_calls[0].function.arguments", {}),
        ("spec.chat.messages[1].tool_calls[0].name", "messages[1].tool_calls[0].function.name", {}),
        ("spec.chat.messages[1].parts[2]", "messages[1].content[2]", {}),
        ("spec.guided.regex", "response_format", {"response_format": {"type": "regex", "pattern": "a"}}),
    ],
)
async def test_errors_of_a_chat_name_the_field_that_was_sent(gateway, script, field, param, fields):
    script.failure = bad_request(field, "is wrong")
    answer = await gateway.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **fields)
    assert (answer.json()["error"]["param"], answer.json()["error"]["message"]) == (param, f"{param}: is wrong")


async def test_a_request_that_exceeds_the_context_is_told_in_openais_words(gateway, script):
    """LiteLLM recognises the words, pydantic-ai the code, and LangChain the code in the message."""
    numbers = {"context_tokens": "64", "prompt_tokens": "60", "output_tokens": "9"}
    violation = error_details_pb2.BadRequest.FieldViolation(field="spec.stopping.max_tokens", description="is 9")
    script.failure = Failure(
        CODE.INVALID_ARGUMENT,
        "spec.stopping.max_tokens: is 9",
        (
            error_details_pb2.ErrorInfo(reason="CONTEXT_OVERFLOW", domain="sluice", metadata=numbers),
            error_details_pb2.BadRequest(field_violations=[violation]),
        ),
    )
    error = (await gateway.post("/v1/completions", prompt="x")).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["message"] == (
        "This model's maximum context length is 64 tokens. However, you requested 69 tokens "
        "(60 in the prompt, 9 in the completion). max_tokens: is 9 (context_length_exceeded)"
    )


async def test_a_prompt_of_too_many_bytes_exceeds_the_context_too(gateway, script):
    violation = error_details_pb2.BadRequest.FieldViolation(field="spec.chat", description="has 9 bytes")
    info = error_details_pb2.ErrorInfo(reason="INVALID_ARGUMENT", domain="sluice", metadata={"spec.chat": "TOO_MANY"})
    details = (info, error_details_pb2.BadRequest(field_violations=[violation]))
    script.failure = Failure(CODE.INVALID_ARGUMENT, "spec.chat: has 9 bytes", details)
    error = (await gateway.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["message"] == (
        "messages: has 9 bytes: it is longer than the model's context length (context_length_exceeded)"
    )


async def test_an_error_in_the_middle(gateway, script):
    script.failure, script.fail_after = with_reason(CODE.INTERNAL, "STEP_FAILED"), 2
    chunks = await gateway.events("/v1/completions", prompt="x")
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["Hello", ", "]
    assert chunks[-1]["error"]["code"] == "step_failed"


async def test_no_router(gateway):
    async with running("127.0.0.1:1") as gateway_without_router:
        answer = await gateway_without_router.post("/v1/completions", prompt="x")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert answer.headers["retry-after"] == "1"


KWARGS = b'{"messages": [{"role": "user"}], "chat_template_kwargs": '
HOSTILE = {
    "no JSON": b"{",
    "nothing": b"",
    "no object": b"[1]",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "deep": b'{"prompt": "x", "z": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep kwargs": KWARGS + b'{"a":' * 40 + b"1" + b"}" * 41,
    "very deep kwargs": KWARGS + b'{"a":' * 900 + b"1" + b"}" * 901,
    "half a character": b'{"prompt": "\\ud800"}',
    "huge number": b'{"prompt": "x", "max_tokens": 1e400}',
    "negative": b'{"prompt": "x", "max_tokens": -1}',
    "beyond 32 bits": b'{"prompt": "x", "max_tokens": 4294967296}',
    "beyond 64 bits": b'{"prompt": "x", "seed": 99999999999999999999999}',
    "ids beyond": b'{"prompt": [99999999999]}',
    "a text for a number": b'{"prompt": "x", "temperature": "hot"}',
    "a bias of no id": b'{"prompt": "x", "logit_bias": {"a": 1}}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "unknown format": b'{"prompt": "x", "response_format": {"type": "xml"}}',
    "stream options alone": b'{"prompt": "x", "stream_options": {"include_usage": true}}',
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_bodies(gateway, script, data, path):
    answer = await gateway.http.post(path, content=data)
    if path != "/tokenize" or answer.status_code != 200:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
    assert (await gateway.http.get("/version")).status_code == 200


async def test_unknown_fields_are_counted(gateway, script):
    known = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "u", "suffix": None}
    answer = await gateway.post("/v1/completions", prompt="x", colour="red", size=3, **known)
    assert answer.status_code == 200
    assert gateway.gateway.counters.unknown_fields == 2


async def test_a_value_that_is_none_of_the_choices(gateway):
    answer = await gateway.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}, {"role": "bot"}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].role")
    assert answer.json()["error"]["message"] == (
        "messages[1].role: Invalid enum value 'bot', must be one of assistant, developer, system, tool, user"
    )


@pytest.mark.parametrize("name", ["suffix", "use_beam_search", "tools"])
async def test_fields_that_would_change_the_answer_are_refused(gateway, name):
    answer = await gateway.post("/v1/completions", prompt="x", **{name: [1]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("fields", "line", "param", "reason"),
    [
        ({"tool_choice": "required"}, 7, "tools", "parameters of 'g': Invalid type: strin"),
        ({"tool_choice": NAMED_G}, 5, "tools", "parameters of 'g': Invalid type: strin"),
        ({"response_format": {"type": "json_object"}}, 8, "tools", "parameters of 'g': Invalid type: strin"),
        ({"response_format": {"type": "json_object"}}, 2, "response_format", "Invalid type: strin"),
        ({"tool_choice": "required"}, None, "tools", "is too complex"),
    ],
)
async def test_an_error_of_a_generated_grammar_speaks_of_the_tool(
    address, script, fields, line, param, reason, streams
):
    quoted = f"at {line}(14): failed to compile JSON schema: Invalid type: strin\n   5 | call: call_0\n   6 | x"
    script.failure = bad_request("spec.guided.ebnf", quoted if line else reason)
    functions = [{"name": "f"}, {"name": "g", "parameters": {"type": "strin"}}]
    tools = [{"type": "function", "function": function} for function in functions]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "stream": streams}
    async with running(address, tool_parser="hermes") as gateway:
        answer = await gateway.post("/v1/chat/completions", **body, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (400, param, f"{param}: {reason}")


async def test_tools_without_a_parser_name_the_setting(gateway):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    answer = await gateway.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], tools=tools)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert "sluice serve --set gateway.tool_parser=hermes" in error["message"]


async def test_a_body_that_is_too_large(address, script):
    async with running(address, max_body_bytes=2048) as small:
        declared = await small.post("/v1/completions", prompt="x" * 4096)
        assert declared.status_code == 413

        async def parts():
            for _ in range(8):
                yield b" " * 512

        streamed = await small.http.post("/v1/completions", content=parts())
        assert streamed.status_code == 413
        assert (await small.post("/v1/completions", prompt="x")).status_code == 200


async def test_a_body_that_does_not_arrive(gateway, monkeypatch):
    monkeypatch.setattr(body, "RECEIVE_SECONDS", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_too_many_requests(address, script):
    script.hangs = True
    async with running(address, max_requests=1) as small:
        first = asyncio.create_task(small.post("/v1/completions", prompt="x"))
        while not script.hanging:
            await asyncio.sleep(0.01)
        refused = await small.post("/v1/completions", prompt="x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert small.gateway.counters.refused == 1
        first.cancel()


async def test_an_error_of_the_gateway_is_a_500_and_logged_without_texts(gateway, monkeypatch):
    def fail(*_, **__):
        raise KeyError("secret")

    monkeypatch.setattr(gateway.gateway.client, "stream", fail)
    answer = await gateway.post("/v1/completions", prompt="x")
    assert answer.status_code == 500
    assert "secret" not in answer.text
