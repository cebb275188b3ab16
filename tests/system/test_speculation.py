"""Speculation on a real ring: the calls of docs/speculation.md, outputs that do not change, and drafts with logits."""

import itertools
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


def calls() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.long
def test_the_call_of_the_page_is_accelerated(client):
    code, _ = calls()
    # `exec` is safe here: the page is part of this repository.
    names = {"client": client}

    def accepted() -> int:
        exec(code, names)
        return names["found"].usage.accepted_draft_tokens

    # How many tokens are drafted depends on the duration of steps.
    assert wait_until(lambda: accepted() > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_speculation_changes_no_output(client, kind):
    options = {"max_tokens": 48, "token_ids": True, **KINDS[kind]}
    plain = client.generate(PROMPT, **options)
    drafted = client.generate(PROMPT, speculation={"max_draft_tokens": 6}, **options)
    for output, expected in zip(drafted.outputs, plain.outputs, strict=True):
        assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
        assert (output.finish_reason, output.stop_string) == (expected.finish_reason, expected.stop_string)
    assert plain.usage.accepted_draft_tokens == 0
    assert drafted.usage.accepted_draft_tokens < drafted.usage.completion_tokens
    assert drafted.usage.completion_tokens == plain.usage.completion_tokens


def test_draft_tokens_of_the_caller_are_accepted(client):
    plain = client.generate("import os\n", max_tokens=40, temperature=0, token_ids=True)
    tokens = list(plain.outputs[0].token_ids)

    def accepted() -> int:
        result = client.generate("import os\n", max_tokens=40, temperature=0, speculation={"draft_token_ids": tokens})
        assert result.text == plain.text
        return result.usage.accepted_draft_tokens

    assert wait_until(lambda: accepted() > 20)


def test_a_stream_sends_the_accepted_tokens_of_a_step_together(client):
    plain = client.generate(PROMPT, max_tokens=48, temperature=0)

    def longest() -> int:
        stream = client.stream(PROMPT, max_tokens=48, temperature=0, speculation={"max_draft_tokens": 6})
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == plain.text
        return max(chunk.token_count for chunk in chunks) if stream.usage.accepted_draft_tokens else 0

    assert wait_until(lambda: longest() > 1)


def test_the_call_with_draft_logits_of_the_page_works(client):
    """The model drafts for itself here, so all draft tokens are accepted with any seed."""
    _, code = calls()
    names = {"client": client, "small": client}
    exec(code, names)
    draft, helped = names["draft"], names["helped"]
    assert helped.text.startswith(draft.text)
    assert helped.text != client.generate(names["prompt"], temperature=1, seed=2, max_tokens=64).text


def own_draft(client, max_tokens: int, seed: int = 1) -> dict:
    """Draft tokens that the model itself samples with this seed, with their logits."""
    draft = client.generate(
        PROMPT, temperature=1, seed=seed, max_tokens=max_tokens, ignore_eos=True, token_ids=True, generation_logits=True
    )
    logits = np.concatenate([tensor.array() for tensor in draft.tensors])
    return {"draft_token_ids": draft.outputs[0].token_ids, "draft_logits": logits}


@pytest.mark.parametrize("kind", ["plain", "n", "stopped", "penalized", "threshold"])
def test_the_number_of_draft_tokens_with_logits_per_step_changes_no_output(client, kind):
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
    options |= {"max_tokens": 48, "seed": 4, "temperature": 1, "token_ids": True}
    one_by_one, *drafted = (
        client.generate(PROMPT, speculation=draft | {"max_draft_tokens": count}, **options) for count in (0, 1, 8)
    )
    for result in drafted:
        for output, expected in zip(result.outputs, one_by_one.outputs, strict=True):
            assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
            assert (output.finish_reason, output.stop_string) == (expected.finish_reason, expected.stop_string)
    assert one_by_one.usage.accepted_draft_tokens == 0


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"draft_logits": np.zeros((1, 4096))}, "spec.speculation.draft_logits.data"),
        ({"draft_logits": np.full((2, 4096), np.nan)}, "spec.speculation.draft_logits.data"),
        ({"draft_logits": None, "acceptance_threshold": 0.5}, "spec.speculation.acceptance_threshold"),
    ],
    ids=["size", "NaN", "threshold alone"],
)
def test_malformed_draft_logits_are_refused_with_their_field(client, changed, field):
    good = {"draft_token_ids": [5, 6], "draft_logits": np.zeros((2, 4096))}
    with pytest.raises(InvalidRequest) as error:
        client.generate(PROMPT, speculation=good | changed)
    assert [violation.field for violation in error.value.violations] == [field]


@pytest.mark.long
def test_a_stream_with_draft_logits_survives_the_death_of_its_engine(ring, client):
    """The model drafts for itself, so the output is the draft if all draft tokens are still used after the death."""
    draft = own_draft(client, 400)
    options = {"temperature": 1, "seed": 2, "max_tokens": 400, "ignore_eos": True, "token_ids": True}
    expected, plain = list(draft["draft_token_ids"]), list(client.generate(PROMPT, **options).outputs[0].token_ids)
    output = []
    for chunk in client.stream(PROMPT, speculation=draft | {"max_draft_tokens": 1}, request_id="moved", **options):
        if not output:
            os.kill(ring.pids["engine-0"], signal.SIGKILL)
        output += chunk.token_ids
    assert output == expected != plain
    (request,) = [request for request in client.stats().requests if request.request_id == "moved"]
    # The stream waited for the restart of the engine.
    assert request.attempts > 1


@pytest.fixture(scope="module")
def drafting():
    """A ring whose model is its own draft model."""
    engine_args = {"draft_model": str(tiny_model.path()), "kv_cache_tokens": 4096}
    with Ring(engines=1, detokenizers=1, engine_args=engine_args) as ring:
        yield ring


@pytest.mark.long
def test_a_draft_model_accelerates_requests_without_changing_them(client, drafting):
    seeds = itertools.count()

    def accepted() -> int:
        options = {"max_tokens": 48, "temperature": 0.7, "seed": next(seeds)}
        result = helped.generate("import os\n", **options)
        assert result.text == client.generate("import os\n", **options).text
        return result.usage.accepted_draft_tokens

    with Client(drafting.address) as helped:
        assert wait_until(lambda: accepted() > 0)


@pytest.mark.long
def test_the_python_example_works(ring, drafting):
    def accepted(address: str) -> tuple[int, int, int]:
        lines = run("drafts.py", address).stdout.splitlines()[-3:]
        counts = [re.fullmatch(r"(\w+): the same text, (\d+) of \d+ tokens drafted", line).groups() for line in lines]
        assert [name for name, _ in counts] == ["without", "drafted", "expected"]
        return tuple(int(count) for _, count in counts)

    for address in (ring.address, drafting.address):
        # How many tokens are drafted depends on the duration of steps.
        assert wait_until(lambda address=address: accepted(address)[2] > 0)
        assert accepted(address)[0] == 0
