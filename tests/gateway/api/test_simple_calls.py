"""Models, tokens, version, health; paths and methods that do not exist."""

import json

import pytest
from openai import APIStatusError, AsyncOpenAI

from sluice import __version__
from sluice.v1 import admin_pb2
from sluice.v1.sampling_pb2 import SamplingParams
from tests.fakes.gateway import running


async def test_models(gateway, script):
    script.default_sampling.CopyFrom(SamplingParams(temperature=0.7, top_k=3))
    models = (await gateway.http.get("/v1/models")).json()
    assert models["data"][0]["default_sampling"] == {"temperature": 0.7, "top_k": 3}
    assert models["object"] == "list"
    assert [(entry["id"], entry["object"], entry["max_model_len"]) for entry in models["data"]] == [
        ("tiny", "model", 1024)
    ]
    assert (await gateway.http.get("/v1/models/tiny")).json() == models["data"][0]
    missing = await gateway.http.get("/v1/models/other/name")
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "model"


async def test_adapters_are_listed_as_models(gateway, script):
    for name in ("sql", "chat", "code"):
        script.loras[name] = admin_pb2.Lora(lora_id=name, rank=8)
    models = (await gateway.http.get("/v1/models", headers={"authorization": "Bearer mine"})).json()["data"]
    assert [(entry["id"], entry["parent"], entry["max_model_len"]) for entry in models] == [
        ("tiny", None, 1024),
        ("chat", "tiny", 1024),
        ("code", "tiny", 1024),
        ("sql", "tiny", 1024),
    ]
    calls = zip(script.seen, script.metadata, strict=True)
    tokens = [
        metadata["authorization"] for request, metadata in calls if isinstance(request, admin_pb2.ListLorasRequest)
    ]
    assert tokens == ["Bearer mine"] * 2
    assert (await gateway.http.get("/v1/models/sql")).json() == models[3]


async def test_adapters_are_loaded_and_unloaded_as_in_vllm(gateway, script):
    headers = {"authorization": "Bearer mine"}
    body = {"lora_name": "sql", "lora_path": "/adapters/sql", "load_inplace": True}
    loaded = await gateway.post("/v1/load_lora_adapter", headers, **body)
    assert (loaded.status_code, loaded.json()["message"]) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert (script.seen[-1].path, script.metadata[-1]["authorization"]) == ("/adapters/sql", "Bearer mine")
    unloaded = await gateway.post("/v1/unload_lora_adapter", headers, lora_name="sql")
    assert unloaded.status_code == 200, unloaded.text
    assert script.metadata[-1]["authorization"] == "Bearer mine"
    missing = await gateway.post("/v1/unload_lora_adapter", lora_name="sql")
    assert missing.status_code == 404, missing.text
    unnamed = await gateway.post("/v1/load_lora_adapter", lora_name="sql", lora_path="")
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "lora_path")


async def test_the_texts_of_tokens(gateway, script):
    answer = await gateway.post("/tokenize", prompt="ab", model=None, return_token_strs=True)
    assert script.seen[-2].offsets
    assert answer.json() == {"tokens": [97, 98], "count": 2, "max_model_len": 1024, "token_strs": ["a", "b"]}
    refused = await gateway.post("/tokenize", messages=[{"role": "user", "content": "a"}], return_token_strs=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_strs")


async def test_tokens(gateway, script):
    response = await gateway.post("/tokenize", prompt="ab", model="tiny", add_special_tokens=False)
    assert response.json() == {"tokens": [97, 98], "count": 2, "max_model_len": 1024}
    tokenize_request = script.seen[-2]
    assert (tokenize_request.model, tokenize_request.add_special_tokens) == ("tiny", False)
    assert (await gateway.post("/detokenize", tokens=[97, 98])).json() == {"prompt": "ab"}
    for wrong, param in (({"messages": []}, "messages"), ({}, "prompt"), ({"prompt": "x", "messages": []}, "messages")):
        answer = await gateway.post("/tokenize", **wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    wrong = await gateway.post("/detokenize", tokens=[-1])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


async def test_tokens_of_a_chat(gateway, script):
    tool = {"type": "function", "function": {"name": "f"}}
    answer = await gateway.post(
        "/tokenize",
        messages=[{"role": "user", "content": "abc"}],
        tools=[tool],
        chat_template_kwargs={"x": 1},
        add_generation_prompt=False,
    )
    assert answer.json() == {"tokens": [97, 98, 99], "count": 3, "max_model_len": 1024}
    chat = script.seen[-2].chat
    assert [(message.role, message.content) for message in chat.messages] == [("user", "abc")]
    assert json.loads(chat.tools_json) == [tool]
    assert dict(chat.template_kwargs) == {"x": 1, "add_generation_prompt": False}


async def test_version_and_health(gateway):
    assert (await gateway.http.get("/version")).json() == {"version": __version__}
    assert (await gateway.http.get("/health")).status_code == 503
    gateway.gateway.ready = True
    assert (await gateway.http.get("/health")).status_code == 200


async def test_unknown_paths_and_models(gateway):
    for answer, status in (
        (await gateway.http.get("/v1/embeddings"), 404),
        (await gateway.http.get("/v1/chat/completions"), 405),
        (await gateway.http.post("/v1/models"), 405),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    unknown = await gateway.http.get("/v1/" + "x" * 1000)
    assert unknown.json()["error"]["message"].startswith(f"GET /v1/{'x' * 196} is not served; the gateway serves GET")


NOT_SERVED = {
    "POST /v1/responses": (404, lambda client: client.responses.create(model="tiny", input="x")),
    "POST /v1/embeddings": (404, lambda client: client.embeddings.create(model="tiny", input="x")),
    "POST /v1/moderations": (404, lambda client: client.moderations.create(input="x")),
    "GET /v1/files": (404, lambda client: client.files.list()),
    "GET /v1/chat/completions/c1": (404, lambda client: client.chat.completions.retrieve("c1")),
    "GET /v1/chat/completions": (405, lambda client: client.chat.completions.list()),
    "DELETE /v1/models/tiny": (405, lambda client: client.models.delete("tiny")),
}


@pytest.mark.parametrize("method_and_path", NOT_SERVED)
async def test_other_calls_of_the_client_are_not_served(gateway, method_and_path):
    status, call = NOT_SERVED[method_and_path]
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        with pytest.raises(APIStatusError) as error:
            await call(client)
    assert (error.value.status_code, error.value.code, error.value.type) == (
        status,
        "unknown_url",
        "invalid_request_error",
    )
    assert f"{method_and_path} is not served" in error.value.message


async def test_cross_origin_requests(address):
    headers = {"origin": "https://chat.example.com", "access-control-request-method": "POST"}
    async with running(address) as closed:
        answer = await closed.http.options("/v1/models", headers=headers)
        assert "access-control-allow-origin" not in answer.headers
    async with running(address, cors_origins=("https://chat.example.com",)) as allowed:
        answer = await allowed.http.options("/v1/models", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
        foreign = await allowed.http.options("/v1/models", headers={**headers, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in foreign.headers
