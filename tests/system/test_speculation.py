"""A real ring with speculation: the calls of docs/speculation.md, and that nothing but the speed changes, unless drafts
come with logits."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from sluice import Client, tiny_model
from sluice.client import InvalidRequest
from sluice.launch import Ring
from tests.fakes.processes import wait_until
from tests.system.test_examples import run

PAGE = Path(__file__).parents[2] / "docs" / "speculation.md"
PROMPT = "def add_one(x):\n    return x + 1\n\n\ndef add_two(x):\n    return x + 2\n\n\n"
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.6, "seed": 3, "n": 2, "logprobs": 1},
    "stopped": {"temperature": 0.0, "stop": ["four"], "ignore_eos": True},
}


@pytest.fixture(scope="module")
def ring():
    with Ring(engines=1, detokenizers=1, engine_args={"max_draft_tokens": 0}) as ring:
        yield ring


@pytest.fixture(scope="module")
def client(ring):
    with Client(ring.address, timeout=100) as client:
        yield client


def calls() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_call_of_the_page(client):
    code, _ = calls()
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


def test_the_call_with_logits_of_the_page(client):
    """The model is its own draft model here, which it agrees with: whatever the seed, the output is the draft."""
    _, code = calls()
    names = {"client": client, "small": client}
    exec(code, names)
    draft, helped = names["draft"], names["helped"]
    assert helped.text.startswith(draft.text)
    assert helped.text != client.generate(names["prompt"], temperature=1, seed=2, max_tokens=64).text


def own_draft(client, max_tokens: int, seed: int = 1) -> dict:
    """What the model draws with this seed, and from what."""
    draft = client.generate(
        PROMPT, temperature=1, seed=seed, max_tokens=max_tokens, ignore_eos=True, token_ids=True, generation_logits=True
    )
    logits = np.concatenate([tensor.array() for tensor in draft.tensors])
    return {"draft_token_ids": draft.outputs[0].token_ids, "draft_logits": logits}


@pytest.mark.parametrize("kind", ["plain", "n", "stopped", "penalized", "threshold"])
def test_with_logits_the_output_is_the_same_however_many_are_drafted(client, kind):
    draft = own_draft(client, 40)
    random = np.random.default_rng(5)
    draft["draft_logits"] = draft["draft_logits"] + random.normal(0, 0.3, draft["draft_logits"].shape)
    options = {
        "plain": {"logprobs": 1},
        "n": {"n": 3, "top_p": 0.95},
        "stopped": {"stop": ["return"]},
        "penalized": {"repetition_penalty": 1.1, "guided": {"regex": "[^é]*"}},
        "threshold": {},
    }[kind]
    if kind == "threshold":
        draft["acceptance_threshold"] = 0.4
    asked = {"max_tokens": 48, "seed": 4, "temperature": 1, "token_ids": True, **options}
    found = [client.generate(PROMPT, speculation=draft | {"max_draft_tokens": most}, **asked) for most in (0, 1, 8)]
    for other in found[1:]:
        for output, expected in zip(other.outputs, found[0].outputs, strict=True):
            assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
            assert (output.finish_reason, output.stop_string) == (expected.finish_reason, expected.stop_string)
    assert found[0].usage.accepted_draft_tokens == 0


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"draft_logits": np.zeros((1, 4096))}, "spec.speculation.draft_logits.data"),
        ({"draft_logits": np.full((2, 4096), np.nan)}, "spec.speculation.draft_logits.data"),
        ({"draft_logits": None, "acceptance_threshold": 0.5}, "spec.speculation.acceptance_threshold"),
    ],
    ids=["size", "NaN", "threshold alone"],
)
def test_bad_logits_are_refused_by_name(client, changed, field):
    good = {"draft_token_ids": [5, 6], "draft_logits": np.zeros((2, 4096))}
    with pytest.raises(InvalidRequest) as error:
        client.generate(PROMPT, speculation=good | changed)
    assert [violation.field for violation in error.value.violations] == [field]


def test_an_engine_dies_in_the_midst_of_a_draft_with_logits(ring, client):
    """The model is its own draft model, so all of the output is the draft, if the draft counts to its end."""
    draft = own_draft(client, 400)
    asked = {"temperature": 1, "seed": 2, "max_tokens": 400, "ignore_eos": True, "token_ids": True}
    expected, plain = list(draft["draft_token_ids"]), list(client.generate(PROMPT, **asked).outputs[0].token_ids)
    found = []
    for chunk in client.stream(PROMPT, speculation=draft | {"max_draft_tokens": 1}, request_id="moved", **asked):
        if not found:
            os.kill(ring.pids["engine-0"], signal.SIGKILL)
        found += chunk.token_ids
    assert found == expected != plain
    (told,) = [each for each in client.stats().requests if each.request_id == "moved"]
    # The stream waited for the engine's successor.
    assert told.attempts > 1


@pytest.fixture(scope="module")
def drafting():
    """Its model is its own draft model."""
    engine_args = {"draft_model": str(tiny_model.path()), "kv_cache_tokens": 4096}
    with Ring(engines=1, detokenizers=1, engine_args=engine_args) as ring:
        yield ring


def test_a_draft_model(client, drafting):
    found: list = []

    def accepted() -> int:
        """Of a request that says nothing about drafts."""
        options = {"max_tokens": 48, "temperature": 0.7, "seed": len(found)}
        found.append(helped.generate("import os\n", **options))
        assert found[-1].text == client.generate("import os\n", **options).text
        return found[-1].usage.accepted_draft_tokens

    with Client(drafting.address) as helped:
        assert wait_until(lambda: accepted() > 0)


def test_the_example(ring, drafting):
    def accepted(address: str) -> tuple[int, int, int]:
        lines = run("drafts.py", address).stdout.splitlines()[-3:]
        found = [re.fullmatch(r"(\w+): the same text, (\d+) of \d+ tokens drafted", line).groups() for line in lines]
        assert [name for name, _ in found] == ["without", "drafted", "expected"]
        return tuple(int(count) for _, count in found)

    for address in (ring.address, drafting.address):
        # How much is drafted depends on how long steps take.
        assert wait_until(lambda address=address: accepted(address)[2] > 0)
        assert accepted(address)[0] == 0
