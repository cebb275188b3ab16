"""Tensors from a real ring, compared with transformers: the page's calls, kills, and a client that stops reading."""

import asyncio
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice import AsyncClient, tiny_model
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
"""Absolute tolerance, since the engine's KV cache may have a lower precision than that of transformers."""


@pytest.fixture(scope="module")
def oracle():
    """Computes (logits, hidden states, output of layer 3) of every position, as numpy arrays."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32).eval()

    @torch.inference_mode()
    def of(tokens):
        result = model(torch.tensor([list(tokens)]), output_hidden_states=True)
        tensors = (result.logits, result.hidden_states[-1], result.hidden_states[3 + 1])
        return tuple(tensor[0].numpy() for tensor in tensors)

    return of


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """A ring with the tensor functions of the page, started in a user's working directory."""
    folder = tmp_path_factory.mktemp("user")
    (module,) = (block for block in blocks("python") if block.startswith("# summaries.py"))
    (folder / "summaries.py").write_text(module)
    (folder / "engine.yaml").write_text("".join(blocks("yaml")))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with Ring(engines=1, detokenizers=1, engine_args={"config": folder / "engine.yaml"}) as ring:
            yield ring


def memory(pid: int) -> int:
    """Resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def near(actual, expected) -> bool:
    return actual.shape == expected.shape and np.allclose(actual, expected, atol=TOLERANCE)


def joined(tensors) -> dict[tuple[int, str, bool], np.ndarray]:
    """Rows by output, tensor name and whether they are the prompt's. Checks that they arrived in order."""
    by_key: dict[tuple[int, str, bool], list[np.ndarray]] = {}
    for tensor in tensors:
        parts = by_key.setdefault((tensor.index, tensor.name, tensor.context), [])
        assert tensor.start == sum(map(len, parts))
        parts.append(tensor.array())
    return {key: np.concatenate(parts) for key, parts in by_key.items()}


def check(tensors, prompt, outputs, oracle) -> None:
    """`tensors`: those of `ALL`, as `joined` returns them. `outputs`: token ids."""
    for name, expected in zip(("context_logits", *NAMES), oracle(prompt), strict=True):
        assert near(tensors.pop((0, name, True)), expected)
    for index, tokens in enumerate(outputs):
        expected = oracle([*prompt, *tokens[:-1]])
        for name, rows in zip(("generation_logits", *NAMES), expected, strict=True):
            assert near(tensors.pop((index, name, False)), rows[len(prompt) - 1 :])
    assert not tensors


def test_available_tensors_are_listed(client):
    assert [*client.models()[0].tensors] == ["best_three", "entropy", "hidden_states", "layers.1", "layers.3"]
    with pytest.raises(InvalidRequest, match=r"layers\.2"):
        client.generate("x", tensors=[{"name": "layers.2"}], max_tokens=1)


def test_the_calls_of_the_page_work(client, oracle, capsys):
    # `exec` and `eval` are safe here: the page is part of this repository.
    first, _, last = blocks("python")
    names = {"client": client}
    exec(first, names)
    ids = [*client.tokenize("def add(a, b):").token_ids]
    assert near(names["context"], oracle(ids)[0])
    assert names["generation"].shape == (8, names["context"].shape[1])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(row[1] for row in rows if row[0] == "hidden_states") == "True"
    tensors = joined(eval(last, names).tensors)
    logits = oracle([*client.tokenize("x = ").token_ids])[0]
    logprobs = torch.from_numpy(logits).log_softmax(-1)
    entropy = tensors.pop((0, "entropy", True))
    assert entropy == pytest.approx(-(logprobs.exp() * logprobs).sum(-1).numpy(), abs=TOLERANCE)
    assert tensors.pop((0, "entropy", False))[0] == pytest.approx(entropy[-1], abs=1e-3)
    best = tensors.pop((0, "best_three", False))
    assert (best.shape, best.dtype) == ((8, 3), np.int32)
    assert best[0].tolist() == logits[-1].argsort()[::-1][:3].tolist()
    assert not tensors


def test_streamed_and_unstreamed_requests_with_several_outputs_return_tensors(client, oracle):
    options = {**ALL, "n": 3, "seed": 1, "max_tokens": 6, "token_ids": True}
    result = client.generate(LONG[:300], **options)
    tokens = [output.token_ids for output in result.outputs]
    check(joined(result.tensors), LONG[:300], tokens, oracle)
    chunks = list(client.stream(LONG[:300], **options))
    streamed = [[token for chunk in chunks if chunk.index == i for token in chunk.token_ids] for i in range(3)]
    assert streamed == [list(output) for output in tokens]
    check(joined(chunk.tensor for chunk in chunks if chunk.tensor), LONG[:300], tokens, oracle)


def test_an_unstreamed_answer_that_would_be_too_large_is_refused(client):
    with pytest.raises(InvalidRequest, match="GenerateStream"):
        client.generate(LONG, context_logits=True, generation_logits=True, n=32, max_tokens=60, ignore_eos=True)


def test_a_resumed_request_returns_only_the_missing_rows(client, oracle):
    prompt = LONG[:100]
    options = {**ALL, "temperature": 0, "max_tokens": 6, "token_ids": True}
    ids = client.generate(prompt, **options).outputs[0].token_ids
    logits, *named = oracle([*prompt, *ids[:-1]])
    resume = {"index": 0, "token_ids": ids[:4], "tensor_rows": 2}
    rest = client.generate(prompt, **options, resume=[resume], resume_context_rows=70)
    assert rest.outputs[0].token_ids == ids[4:]
    starts = {(tensor.name, tensor.context): tensor.start for tensor in rest.tensors}
    arrays = {(tensor.name, tensor.context): tensor.array() for tensor in rest.tensors}
    assert starts == {key: 70 if key[1] else 2 for key in arrays}
    assert near(arrays["context_logits", True], logits[70:100])
    assert near(arrays["generation_logits", False], logits[101:])
    for name, rows in zip(NAMES, named, strict=True):
        assert near(arrays[name, True], rows[70:100])
        assert near(arrays[name, False], rows[101:])


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_every_row_arrives_once_although_services_are_killed(oracle):
    prompts = [LONG[i : i + 400] for i in range(0, 64, 8)]
    # Small chunks make the prompts take seconds.
    engine = {"max_tokens_per_step": 8, "max_batch_size": 4, "output_layers": (3,)}
    with Ring(routers=1, engines=2, detokenizers=2, engine_args=engine) as ring:
        async with AsyncClient(ring.address, timeout=200) as client:
            rows, killed = 0, iter(("engine-0", "detok-1"))

            def count(tensor) -> None:
                """Kill one of the services after each third of the prompts' rows."""
                nonlocal rows
                before, rows = rows, rows + len(tensor.array()) * (tensor.name == "context_logits")
                if before // 1000 != rows // 1000 and (victim := next(killed, None)):
                    os.kill(ring.pids[victim], signal.SIGKILL)

            async def read(prompt):
                chunks = []
                async for chunk in client.stream(prompt, **ALL, max_tokens=24, seed=1, token_ids=True):
                    chunks.append(chunk)
                    if chunk.tensor:
                        count(chunk.tensor)
                tokens = [token for chunk in chunks for token in chunk.token_ids]
                check(joined(chunk.tensor for chunk in chunks if chunk.tensor), prompt, [tokens], oracle)
                return len(tokens)

            streams = [asyncio.ensure_future(read(prompt)) for prompt in prompts]
            assert await asyncio.gather(*streams) == [24] * len(prompts)
            assert next(killed, None) is None


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_client_that_stops_reading_delays_only_itself(oracle):
    """The rows that wait for it are bounded in the engine and the router. It receives the rest once it reads again."""
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
            # One block of logits, and buffers of gRPC and ZeroMQ, but not the 29 MB of the whole prompt.
            assert max(grown.values()) < 20 << 20, grown
            parts += [chunk async for chunk in stream]
    tensors = joined(chunk.tensor for chunk in parts if chunk.tensor)
    assert near(tensors[0, "context_logits", True], oracle(prompt)[0])
