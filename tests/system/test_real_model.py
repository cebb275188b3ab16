"""A ring with a model that people use, as a GGUF file: its chat template, tools, guides and OpenAI's client."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jsonschema import validate
from openai import OpenAI
from transformers import AutoTokenizer

from sluice.checkpoint.fingerprint import TOOL_USE_FILE
from sluice.gguf.folder import convert
from sluice.launch import Ring
from tests.fakes.ports import free_ports

CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is the capital of Japan?"},
]
"""Every token of its answer leads by more than 1.3 in logits, so rounding on any CPU does not change it."""
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}}]
TOOL_USE = """{{ '<|im_start|>system
Call a function in <tool_call></tool_call>:
' }}{% for tool in tools %}{{ tool | tojson }}{{ '<|im_end|>
' }}{% endfor %}"""
"""The model's own template does not use tools. This part comes before it."""


@pytest.fixture(scope="module")
def folder(real_gguf, tmp_path_factory) -> Path:
    """The model with a second template, for chats with tools."""
    folder = tmp_path_factory.mktemp("model") / "smollm2"
    convert(real_gguf, folder, link=True)
    (folder / TOOL_USE_FILE).parent.mkdir(parents=True)
    (folder / TOOL_USE_FILE).write_text(TOOL_USE + (folder / "chat_template.jinja").read_text())
    return folder


@pytest.fixture(scope="module")
def ring(folder) -> Iterator[Ring]:
    port = free_ports(2)
    with Ring(
        folder,
        detokenizers=1,
        port=port,
        http_port=port + 1,
        engine_args={"kv_cache_tokens": 4096, "threads": 1},
        gateway_args={"tool_parser": "hermes"},
    ) as ring:
        yield ring


@pytest.fixture(scope="module")
def openai(ring) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{ring.http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chats_are_tokenized_as_by_transformers(client, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [*CHAT, {"role": "assistant", "content": "Tokyo."}, {"role": "user", "content": " Früher?\n😀 "}]
    for chat in (CHAT, CHAT[1:], turns):
        for tools in (None, TOOLS):
            options = {} if tools is None else {"tools_json": json.dumps(tools)}
            expected = tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, return_dict=False)
            assert list(client.tokenize(chat, **options).token_ids) == expected


def test_a_greedy_answer_makes_sense_and_is_the_same_beside_others(client):
    greedy = {"temperature": 0.0, "max_tokens": 24}
    alone = client.generate(CHAT, **greedy)
    assert alone.text == "The capital of Japan is Tokyo."
    assert alone.finish_reason == "eos"
    with ThreadPoolExecutor() as threads:
        others = [threads.submit(client.generate, f"Number {i}:", max_tokens=24) for i in range(3)]
        assert "".join(chunk.text for chunk in client.stream(CHAT, **greedy)) == alone.text
        assert all(other.result().text for other in others)


def test_a_required_tool_is_called_with_arguments_of_its_schema(openai):
    messages = [{"role": "user", "content": "How warm is it in Oslo, in celsius?"}]
    answer = openai.chat.completions.create(
        model="smollm2",
        messages=messages,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=100,
        temperature=0,
        parallel_tool_calls=False,
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    for call in answer.message.tool_calls:
        assert call.function.name == "weather"
        validate(json.loads(call.function.arguments), WEATHER)


def test_an_answer_has_the_form_of_its_json_schema(client, openai):
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    answer = openai.chat.completions.create(
        model="smollm2", messages=CHAT, response_format=form, max_tokens=100, temperature=0
    ).choices[0]
    validate(json.loads(answer.message.content), WEATHER)
    guided = {"json_schema": json.dumps(WEATHER)}
    for seed in range(3):
        validate(json.loads(client.generate(CHAT, guided=guided, max_tokens=100, seed=seed).text), WEATHER)


def test_openai_streams_the_answer_of_the_ring(client, openai):
    direct = client.generate(CHAT, temperature=0.0, max_tokens=24)
    chunks = openai.chat.completions.create(
        model="smollm2",
        messages=CHAT,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == direct.text
    assert parts[-1].choices[0].finish_reason == "stop"
    assert last.usage.prompt_tokens == direct.usage.prompt_tokens


def test_completions_have_the_logprobs_of_the_ring(client, openai):
    prompt = "The quick brown fox"
    direct = client.generate(prompt, temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=0)
    choice = openai.completions.create(
        model="smollm2", prompt=prompt, temperature=0, max_tokens=8, logprobs=2, echo=True
    ).choices[0]
    assert choice.text == prompt + direct.text
    entries = [*direct.prompt_logprobs, *direct.outputs[0].logprobs]
    assert choice.logprobs.tokens == [entry.token.decode() for entry in entries]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx([entry.logprob for entry in entries[1:]], abs=1e-4)
