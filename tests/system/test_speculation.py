"""A real ring with speculation: the calls of docs/speculation.md, and that nothing but the speed changes."""

import re
from pathlib import Path

import pytest

from sluice import Client
from sluice.launch import Ring
from tests.fakes.processes import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "speculation.md"
PROMPT = "def add_one(x):\n    return x + 1\n\n\ndef add_two(x):\n    return x + 2\n\n\n"
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.6, "seed": 3, "n": 2, "logprobs": 1},
    "stopped": {"temperature": 0.0, "stop": ["four"], "ignore_eos": True},
}


@pytest.fixture(scope="module")
def client():
    with Ring(engines=1, detokenizers=1, engine_args={"max_draft_tokens": 0}) as ring, Client(ring.address) as client:
        yield client


def test_the_call_of_the_page(client):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    # No other text is on the page: it is ours.
    names = {"client": client}

    def accepted() -> int:
        exec(code, names)
        return names["found"].usage.accepted_draft_tokens

    # How much is drafted depends on how long steps take.
    assert wait_until(lambda: accepted() > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_that_without(client, kind):
    options = {"max_tokens": 48, "token_ids": True, **KINDS[kind]}
    plain = client.generate(PROMPT, **options)
    drafted = client.generate(PROMPT, speculation={"max_draft_tokens": 6}, **options)
    for found, expected in zip(drafted.outputs, plain.outputs, strict=True):
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        assert (found.finish_reason, found.stop_string) == (expected.finish_reason, expected.stop_string)
    assert plain.usage.accepted_draft_tokens == 0
    assert drafted.usage.accepted_draft_tokens < drafted.usage.completion_tokens
    assert drafted.usage.completion_tokens == plain.usage.completion_tokens


def test_what_the_caller_expects(client):
    plain = client.generate("import os\n", max_tokens=40, temperature=0, token_ids=True)
    expected = list(plain.outputs[0].token_ids)

    def accepted() -> int:
        found = client.generate("import os\n", max_tokens=40, temperature=0, speculation={"draft_token_ids": expected})
        assert found.text == plain.text
        return found.usage.accepted_draft_tokens

    assert wait_until(lambda: accepted() > 20)


def test_a_stream_of_it(client):
    plain = client.generate(PROMPT, max_tokens=48, temperature=0)

    def longest() -> int:
        stream = client.stream(PROMPT, max_tokens=48, temperature=0, speculation={"max_draft_tokens": 6})
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == plain.text
        return max(chunk.token_count for chunk in chunks) if stream.usage.accepted_draft_tokens else 0

    # Tokens that one step brought arrive together.
    assert wait_until(lambda: longest() > 1)
