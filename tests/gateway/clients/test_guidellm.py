"""guidellm against the gateway of a real model: no request fails, and its token counts are those of the ring."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from sluice.launch import Ring
from tests.fakes.ports import free_ports
from tests.gateway.clients.environment import environment, run

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(1800)]

NAME = "smollm2"
REQUESTS, OUTPUT = 12, 24
TEXTS = f"kind=synthetic_text,prefix_count=1,prefix_tokens=40,prompt_tokens=32,output_tokens={OUTPUT}"
"""Synthetic texts, whose common beginning is longer than a block of the prefix cache."""

COUNTERS = ("prompt_tokens", "cached_tokens", "completion_tokens")


@pytest.fixture(scope="module")
def guidellm() -> Path:
    return environment("guidellm", "guidellm==0.8.1") / "guidellm"


@pytest.fixture(scope="module")
def ring(guidellm, real_model) -> Iterator[Ring]:
    port = free_ports(8)
    with Ring(str(real_model), name=NAME, port=port, http_port=port + 1, metrics_port=port + 2) as ring:
        yield ring


@pytest.fixture(scope="module")
def tokenizer(real_model):
    return AutoTokenizer.from_pretrained(real_model)


def counted(ring: Ring) -> list[float]:
    """The router's COUNTERS."""
    with urllib.request.urlopen(f"{ring.status_pages[0]}metrics", timeout=30) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return [values[f"sluice_router_{name}_total"] for name in COUNTERS]


def prompt_length(tokenizer: Any, body: dict[str, Any]) -> int:
    """The tokens of a request's prompt, by transformers."""
    if "prompt" in body:
        return len(tokenizer(body["prompt"])["input_ids"])
    messages = [{"role": sent["role"], "content": text(sent["content"])} for sent in body["messages"]]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(prompt)["input_ids"])


def text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


@pytest.mark.parametrize(
    ("path", "streamed"),
    [("/v1/completions", True), ("/v1/chat/completions", True), ("/v1/chat/completions", False)],
)
def test_every_request_completes_with_the_token_counts_of_the_ring(
    guidellm, ring, real_model, tokenizer, tmp_path, path, streamed
):
    before, report = counted(ring), tmp_path / "report.json"
    server = f"kind=openai_http,target=http://{ring.http_address},model={NAME},request_format={path},stream={streamed}"
    options = {
        "backend": server,
        "tokenizer": f"kind=huggingface_auto,model={real_model}",
        "profile": "kind=concurrent,streams=4",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "data": TEXTS,
        "output": f"kind=json,path={report}",
    }
    run([guidellm, "run", "--disable-console", *(f"--{name}={value}" for name, value in options.items())])
    requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
    assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (REQUESTS, [], [])
    for request in requests["successful"]:
        body = json.loads(request["request_args"])["body"]
        assert body.get("stream_options", {}).get("continuous_usage_stats", False) == streamed
        assert request["prompt_tokens"] == prompt_length(tokenizer, body)
        assert request["output_tokens"] == OUTPUT
        # A part of a character comes with the token that completes it.
        assert not streamed or 0 < request["info"]["timings"]["token_iterations"] <= OUTPUT
    sums = [
        sum(request[name] for request in requests["successful"])
        for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    ]
    assert sums == [after - earlier for earlier, after in zip(before, counted(ring), strict=True)]
    assert sums[1] > 0
