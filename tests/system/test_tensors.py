"""Tensors from a real ring, beside transformers: the page's calls, services that die, a client that stops reading."""

import asyncio
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice import AsyncClient, Client, tiny_model
from sluice.client import InvalidRequest
from sluice.launch import Ring

PAGE = Path(__file__).parents[2] / "docs" / "tensors.md"
LONG = [(7 * i + i // 100) % 4000 for i in range(1900)]
NAMES = ("hidden_states", "layers.3")
ALL = {
    "context_logits": True,
    "generation_logits": True,
    "tensors": [{"name": name, "context": True} for name in NAMES],
}
TOLERANCE = 0.05
"""Of logits: the engine's cache may be of less precision than transformers'."""


@pytest.fixture(scope="module")
def oracle():
    """(logits, hidden states, those after layer 3) of every position, as numpy arrays."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32).eval()

    @torch.inference_mode()
    def of(tokens):
        found = model(torch.tensor([list(tokens)]), output_hidden_states=True)
        return tuple(each[0].numpy() for each in (found.logits, found.hidden_states[-1], found.hidden_states[3 + 1]))

    return of


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """With the functions of the page, in the working directory of a user."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "summaries.py").write_text(next(each for each in blocks("python") if each.startswith("# summaries.py")))
    (folder / "engine.yaml").write_text("".join(blocks("yaml")))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with Ring(engines=1, detokenizers=1, engine_args={"config": folder / "engine.yaml"}) as ring:
            yield ring


@pytest.fixture
def client(ring):
    with Client(ring.address, timeout=100) as client:
        yield client


def memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def near(found, right) -> bool:
    return found.shape == right.shape and np.allclose(found, right, atol=TOLERANCE)


def joined(tensors) -> dict[tuple[int, str, bool], np.ndarray]:
    """By output, name and whether they are the prompt's. Rows must come in order."""
    found: dict[tuple[int, str, bool], list[np.ndarray]] = {}
    for each in tensors:
        parts = found.setdefault((each.index, each.name, each.context), [])
        assert each.start == sum(map(len, parts))
        parts.append(each.array())
    return {key: np.concatenate(parts) for key, parts in found.items()}


def check(found, prompt, outputs, oracle) -> None:
    """`found`: all of `ALL`. `outputs`: token ids."""
    for name, right in zip(("context_logits", *NAMES), oracle(prompt), strict=True):
        assert near(found.pop((0, name, True)), right)
    for index, tokens in enumerate(outputs):
        right = oracle([*prompt, *tokens[:-1]])
        for name, rows in zip(("generation_logits", *NAMES), right, strict=True):
            assert near(found.pop((index, name, False)), rows[len(prompt) - 1 :])
    assert not found


def test_what_is_offered(client):
    assert [*client.models()[0].tensors] == ["best_three", "entropy", "hidden_states", "layers.1", "layers.3"]
    with pytest.raises(InvalidRequest, match=r"layers\.2"):
        client.generate("x", tensors=[{"name": "layers.2"}], max_tokens=1)


def test_the_calls_of_the_page(client, oracle, capsys):
    # No other text is on the page: it is ours.
    first, _, last = blocks("python")
    names = {"client": client}
    exec(first, names)
    ids = [*client.tokenize("def add(a, b):").token_ids]
    assert near(names["context"], oracle(ids)[0])
    assert names["generation"].shape == (8, names["context"].shape[1])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(row[1] for row in rows if row[0] == "hidden_states") == "True"
    found = joined(eval(last, names).tensors)
    logits = oracle([*client.tokenize("x = ").token_ids])[0]
    logprobs = torch.from_numpy(logits).log_softmax(-1)
    entropy = found.pop((0, "entropy", True))
    assert entropy == pytest.approx(-(logprobs.exp() * logprobs).sum(-1).numpy(), abs=TOLERANCE)
    assert found.pop((0, "entropy", False))[0] == pytest.approx(entropy[-1], abs=1e-3)
    best = found.pop((0, "best_three", False))
    assert (best.shape, best.dtype) == ((8, 3), np.int32)
    assert best[0].tolist() == logits[-1].argsort()[::-1][:3].tolist()
    assert not found


def test_a_call_and_a_stream_with_several_outputs(client, oracle):
    options = {**ALL, "n": 3, "seed": 1, "max_tokens": 6, "token_ids": True}
    whole = client.generate(LONG[:300], **options)
    tokens = [output.token_ids for output in whole.outputs]
    check(joined(whole.tensors), LONG[:300], tokens, oracle)
    chunks = list(client.stream(LONG[:300], **options))
    streamed = [[token for each in chunks if each.index == i for token in each.token_ids] for i in range(3)]
    assert streamed == [list(each) for each in tokens]
    check(joined(each.tensor for each in chunks if each.tensor), LONG[:300], tokens, oracle)


def test_an_answer_of_one_message_is_bounded(client):
    with pytest.raises(InvalidRequest, match="GenerateStream"):
        client.generate(LONG, context_logits=True, generation_logits=True, n=32, max_tokens=60, ignore_eos=True)


def test_a_resumed_stream_brings_what_is_missing(client, oracle):
    prompt = LONG[:100]
    options = {**ALL, "temperature": 0, "max_tokens": 6, "token_ids": True}
    ids = client.generate(prompt, **options).outputs[0].token_ids
    logits, *named = oracle([*prompt, *ids[:-1]])
    resume = {"index": 0, "token_ids": ids[:4], "tensor_rows": 2}
    rest = client.generate(prompt, **options, resume=[resume], resume_context_rows=70)
    assert rest.outputs[0].token_ids == ids[4:]
    starts = {(each.name, each.context): each.start for each in rest.tensors}
    found = {(each.name, each.context): each.array() for each in rest.tensors}
    assert starts == {key: 70 if key[1] else 2 for key in found}
    assert near(found["context_logits", True], logits[70:100])
    assert near(found["generation_logits", False], logits[101:])
    for name, rows in zip(NAMES, named, strict=True):
        assert near(found[name, True], rows[70:100])
        assert near(found[name, False], rows[101:])


@pytest.mark.timeout(300)
async def test_services_die_in_the_midst_of_them(oracle):
    """No client notices: each row comes once, and is right."""
    prompts = [LONG[i : i + 400] for i in range(0, 64, 8)]
    # Chunks so small that the prompts take seconds.
    engine = {"max_tokens_per_step": 8, "max_batch_size": 4, "output_layers": (3,)}
    with Ring(routers=1, engines=2, detokenizers=2, engine_args=engine) as ring:
        async with AsyncClient(ring.address, timeout=200) as client:
            rows, killed = 0, iter(("engine-0", "detok-1"))

            def count(tensor) -> None:
                """Each third of the prompts' rows one of the services dies."""
                nonlocal rows
                before, rows = rows, rows + len(tensor.array()) * (tensor.name == "context_logits")
                if before // 1000 != rows // 1000 and (victim := next(killed, None)):
                    os.kill(ring.pids[victim], signal.SIGKILL)

            async def ask(prompt):
                found = []
                async for each in client.stream(prompt, **ALL, max_tokens=24, seed=1, token_ids=True):
                    found.append(each)
                    if each.tensor:
                        count(each.tensor)
                tokens = [token for each in found for token in each.token_ids]
                check(joined(each.tensor for each in found if each.tensor), prompt, [tokens], oracle)
                return len(tokens)

            streams = [asyncio.ensure_future(ask(prompt)) for prompt in prompts]
            assert await asyncio.gather(*streams) == [24] * len(prompts)
            assert next(killed, None) is None


@pytest.mark.timeout(300)
async def test_a_client_that_stops_reading_holds_up_itself_alone(oracle):
    """What waits for it is bounded in the engine and in the router, and the rest of its rows comes once it reads."""
    prompt = LONG[:1800]  # 29 MB of logits
    engine = {"tensor_buffer": 1 << 20, "max_tokens_per_step": 256}
    router = {"max_undelivered_bytes": 2 << 20}
    with Ring(engines=1, detokenizers=1, engine_args=engine, router_args=router) as ring:
        async with AsyncClient(ring.address, timeout=200) as client:
            await client.generate(prompt[:64], context_logits=True, max_tokens=4)
            before = {name: memory(pid) for name, pid in ring.pids.items()}
            stream = client.stream(prompt, context_logits=True, max_tokens=4, seed=1)
            parts = [await anext(stream)]
            for _ in range(4):
                await asyncio.sleep(0.5)
                assert (await client.generate("import os", max_tokens=8, ignore_eos=True)).usage.completion_tokens == 8
            grown = {name: memory(pid) - before[name] for name, pid in ring.pids.items()}
            # The logits of a block of rows, buffers of gRPC and of ZeroMQ, but not the 29 MB.
            assert max(grown.values()) < 20 << 20, grown
            parts += [each async for each in stream]
    found = joined(each.tensor for each in parts if each.tensor)
    assert near(found[0, "context_logits", True], oracle(prompt)[0])
