"""Log-probabilities of prompts from a real ring, compared with transformers.

Covers the examples of the documentation, services that are killed, and the scores that lm-eval computes.
"""

import asyncio
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice import AsyncClient, tiny_model
from sluice.client import InvalidRequest
from sluice.launch import Ring

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "prompt_logprobs.md"
EXAMPLES = (
    ("import numpy as", " np"),
    ("def add(a, b):\n    return ", "a + b"),
    ("", "class Stack:"),
    ("for line in open(path):\n    print(", "line)"),
    ("x = ", "banana split"),
)
LONG = [(7 * i + i // 100) % 4000 for i in range(1900)]


@pytest.fixture(scope="module")
def oracle():
    """Computes the log-probabilities [T - 1, vocab] of the tokens that may follow each token but the last."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32).eval()

    @torch.inference_mode()
    def of(prompt) -> torch.Tensor:
        return model(torch.tensor([list(prompt)])).logits[0, :-1].log_softmax(-1)

    return of


def check(entries, prompt, oracle) -> None:
    assert [entry.token_id for entry in entries] == list(prompt)
    assert (entries[0].logprob, entries[0].rank, entries[0].top) == (None, 0, ())
    right = oracle(prompt)[range(len(prompt) - 1), list(prompt)[1:]]
    # The engine's KV cache may have a lower precision than that of transformers.
    assert [entry.logprob for entry in entries[1:]] == pytest.approx(right.tolist(), abs=0.02)


def test_the_calls_of_the_page_work(client, oracle, capsys):
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    # `exec` is safe here: the page is part of this repository.
    names = {"client": client}
    exec(first, names)
    check(names["found"].prompt_logprobs, [entry.token_id for entry in names["found"].prompt_logprobs], oracle)
    assert b"".join(entry.token for entry in names["found"].prompt_logprobs) == b"def add(a, b):\n    return a + b"
    exec(second, names)
    row = oracle([*names["context"], *names["continuation"]])[len(names["context"]) - 1 :]
    right = row[range(len(names["continuation"])), names["continuation"]].sum().item()
    assert names["likelihood"] == pytest.approx(right, abs=0.02)
    assert names["greedy"] == (row.argmax(-1).tolist() == list(names["continuation"]))


def test_streamed_and_unstreamed_requests_with_several_outputs_return_prompt_logprobs(client, oracle):
    plain = client.generate(LONG, prompt_logprobs=3, logprobs=1, n=3, seed=1, max_tokens=4, token_ids=True)
    check(plain.prompt_logprobs, LONG, oracle)
    assert all(len(entry.top) == 3 for entry in plain.prompt_logprobs[1:])
    stream = client.stream(LONG, prompt_logprobs=3, logprobs=1, n=3, seed=1, max_tokens=4, token_ids=True)
    ids = {i: [] for i in range(3)}
    for chunk in stream:
        ids[chunk.index] += chunk.token_ids
    check(stream.prompt_logprobs, LONG, oracle)
    assert [tuple(ids[i]) for i in range(3)] == [output.token_ids for output in plain.outputs]
    assert client.generate(LONG, max_tokens=1).usage.cached_tokens > 0


def test_a_resumed_request_does_not_repeat_prompt_logprobs(client):
    first = client.generate(LONG, prompt_logprobs=1, temperature=0, max_tokens=6, token_ids=True)
    ids = first.outputs[0].token_ids
    rest = client.generate(
        LONG,
        prompt_logprobs=1,
        temperature=0,
        max_tokens=6,
        token_ids=True,
        resume=[{"index": 0, "token_ids": ids[:3]}],
    )
    assert rest.prompt_logprobs == ()
    assert rest.outputs[0].token_ids == ids[3:]


def test_too_many_alternatives_are_refused(client):
    with pytest.raises(InvalidRequest) as error:
        client.generate([5], prompt_logprobs=21)
    assert [violation.field for violation in error.value.violations] == ["spec.output.prompt_logprobs"]


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_prompts_are_complete_although_services_are_killed(oracle):
    prompts = [LONG[i:] for i in range(0, 64, 8)]
    # Small chunks make the prompts take seconds.
    with Ring(engines=2, detokenizers=2, engine_args={"max_tokens_per_step": 4, "max_batch_size": 4}) as ring:
        async with AsyncClient(ring.address, timeout=200) as client:

            async def read(prompt):
                stream = client.stream(prompt, prompt_logprobs=1, max_tokens=8, seed=1)
                chunks = [chunk async for chunk in stream]
                assert sum(chunk.token_count for chunk in chunks) == 8
                return stream.prompt_logprobs

            async def until_busy(victim):
                """Wait until the victim serves a stream."""
                async with asyncio.timeout(100):
                    while victim not in busy_peers(await client.stats()):
                        await asyncio.sleep(0.05)

            streams = [asyncio.ensure_future(read(prompt)) for prompt in prompts]
            for victim in ("engine-0", "detok-1"):
                await until_busy(victim)
                assert not any(stream.done() for stream in streams)
                os.kill(ring.pids[victim], signal.SIGKILL)
            for prompt, logprobs in zip(prompts, await asyncio.gather(*streams), strict=True):
                check(logprobs, prompt, oracle)


def busy_peers(stats) -> set[str]:
    engines = {engine.engine_id for engine in stats.engines if engine.active_requests}
    return engines | {detokenizer.detokenizer_id for detokenizer in stats.detokenizers if detokenizer.streams}


@pytest.fixture
def adapter(monkeypatch):
    """The class of the example. If lm-eval is not installed, it derives from a stand-in."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        package, api, model = (ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"))
        package.simple_evaluate, model.LM = None, object
        for module in (package, api, model):
            monkeypatch.setitem(sys.modules, module.__name__, module)
    return runpy.run_path(str(ROOT / "examples" / "python" / "lm_eval_scores.py"))["SluiceLM"]


def test_the_scores_of_lm_eval_equal_those_of_transformers(client, adapter, oracle):
    (served,) = client.models()
    prefix = served.eos_token_ids[0]
    model = adapter(client, prefix, served.max_context_tokens)
    scores = model.loglikelihood([SimpleNamespace(args=args) for args in EXAMPLES])
    for (context, continuation), (likelihood, greedy) in zip(EXAMPLES, scores, strict=True):
        cut = len(context.rstrip())
        ids = client.tokenize(context + continuation, add_special_tokens=False).token_ids
        before = client.tokenize(context[:cut], add_special_tokens=False).token_ids if context else ()
        rows = oracle([*(before or [prefix]), *ids[len(before) :]])[-(len(ids) - len(before)) :]
        tokens = list(ids[len(before) :])
        assert likelihood == pytest.approx(rows[range(len(tokens)), tokens].sum().item(), abs=0.05)
        assert greedy == (rows.argmax(-1).tolist() == tokens)
    text = "import os\n\n\ndef main():\n    pass\n"
    text_ids = list(client.tokenize(text, add_special_tokens=False).token_ids)
    right = oracle([prefix, *text_ids])[range(len(text_ids)), text_ids].sum().item()
    assert model.loglikelihood_rolling([SimpleNamespace(args=(text,))]) == [pytest.approx(right, abs=0.1)]
    assert model.generate_until([SimpleNamespace(args=("import os\n", {"until": ["\n\n"], "max_gen_toks": 8}))])
