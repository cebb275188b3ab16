"""The examples in docs/http.md and docs/tutorials/openai_client.md work as documented."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.launch import Ring
from tests.fakes.ports import free_ports

DOCS = Path(__file__).parents[2] / "docs"
ADDRESS = "127.0.0.1:8000"
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def address():
    port = free_ports(2)
    with Ring(detokenizers=1, port=port, http_port=port + 1, gateway_args={"tool_parser": "hermes"}) as ring:
        yield ring.http_address


def run(page: str, language: str, address: str) -> list[str]:
    """Run all examples of a page in one language. Returns what each prints."""
    sources = re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    command = [sys.executable, "-c"] if language == "python" else ["bash", "-ec"]
    printed = []
    for source in sources:
        assert source.count(ADDRESS) == 1
        adapted = [*command, source.replace(ADDRESS, address)]
        # Users of OpenAI's client do not have our packages.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(adapted, capture_output=True, text=True, timeout=110, check=True, env=environment)
        printed.append(done.stdout)
    return printed


def tokens_of(line: str) -> int:
    """The count in a line like "7 tokens". Sampled answers may end early."""
    (count,) = re.fullmatch(r"(\d+) tokens", line).groups()
    return int(count)


@pytest.mark.long
def test_the_python_example_of_the_page(address):
    (streamed,) = run("http.md", "python", address)
    lines = streamed.splitlines()
    assert 1 <= tokens_of(lines[-2]) <= 32
    assert lines[-1] in ("yes", "no")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_examples(address):
    (streamed,) = run("http.md", "bash", address)
    assert streamed.count("data: {") > 2
    models, chat, tokens = run("tutorials/openai_client.md", "bash", address)
    assert [model["id"] for model in json.loads(models)["data"]] == ["tiny"]
    assert chat.rstrip().endswith("data: [DONE]")
    assert json.loads(tokens)["count"] == len(json.loads(tokens)["tokens"]) > 5


@pytest.mark.long
def test_the_python_examples_of_the_tutorial(address):
    answer, many, person, call, error = run("tutorials/openai_client.md", "python", address)
    assert 1 <= tokens_of(answer.splitlines()[-1]) <= 32
    assert [line[1:16] for line in many.splitlines()] == [f"def method_{i}(se" for i in range(8)]
    assert re.fullmatch(r"name='[A-Z][a-z]+' age=\d+\n", person)
    assert re.fullmatch(r"get_weather \{\s*\"city\"\s*:\s*\"[A-Z][a-z]+\"\s*\}\n", call)
    assert error.startswith("temperature | ")
