"""Log-probabilities of prompts equal those of one forward pass of transformers, for any batching and chunking."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_worker.runner import forward
from engine_worker.runner.forward import LEAST_ROWS
from sluice.wire.params import SamplingParams, StopParams
from sluice.wire.prompt_logprobs import Row
from tests.parity.harness import EngineHarness

GREEDY = SamplingParams(temperature=0.0)
ONE = StopParams(max_tokens=1)
TOP = 3


@pytest.fixture(scope="module")
def oracle(model_folder) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Computes the log-probabilities [T - 1, vocab] of the tokens that may follow each token but the last."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    @cache
    @torch.inference_mode()
    def of(prompt: tuple[int, ...]) -> torch.Tensor:
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)

    return of


def check(actual: list[Row], prompt: list[int], oracle: Callable[[tuple[int, ...]], torch.Tensor], top: int) -> None:
    expected = oracle(tuple(prompt))
    assert len(actual) == len(prompt) - 1 == len(expected)
    for (logprob, rank, best), row, token in zip(actual, expected, prompt[1:], strict=True):
        assert logprob == pytest.approx(row[token].item(), abs=1e-4)
        # Tokens that are almost equally likely may change places.
        assert int((row > row[token] + 1e-4).sum()) < rank <= 1 + int((row > row[token] - 1e-4).sum())
        assert len(best) == top
        values = [value for _, value in best]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
        assert [row[token].item() for token, _ in best] == pytest.approx(values, abs=1e-4)


def test_prompts_of_all_lengths_share_a_batch_with_requests_without_logprobs(model_folder, prompts, oracle):
    harness = EngineHarness(model_folder)
    selected = [*prompts[:5], *prompts[10:40:6]]
    numbers = [harness.send(prompt, GREEDY, ONE, prompt_logprobs=i % 4) for i, prompt in enumerate(selected)]
    plain = [harness.send(prompt, GREEDY, ONE) for prompt in selected]
    harness.run()
    for i, (prompt, number) in enumerate(zip(selected, numbers, strict=True)):
        check(harness.prompt_logprobs(number), prompt, oracle, i % 4)
        assert harness.stream(number).tokens == harness.stream(plain[i]).tokens
    assert not any(map(harness.prompt_logprobs, plain))


@pytest.mark.long
@pytest.mark.one_model
@pytest.mark.parametrize(
    ("overlap", "backend"),
    [
        (True, "torch"),
        # Other tests cover chunks of these almost.
        pytest.param(False, "torch", marks=pytest.mark.long),
        pytest.param(True, "openvino", marks=pytest.mark.long),
        pytest.param(False, "openvino", marks=pytest.mark.long),
    ],
)
def test_chunks_may_end_anywhere(model_folder, prompts, oracle, overlap, backend, monkeypatch):
    """At any distance from the ends of KV cache blocks and of blocks of rows."""
    monkeypatch.setattr(forward, "BLOCK_BYTES", 0)
    prompt = prompts[5][: 2 * LEAST_ROWS + 3]
    for chunk in (1, 2, 7, 31, 32, 33, LEAST_ROWS - 1, LEAST_ROWS, LEAST_ROWS + 1, len(prompt) - 1, 512):
        harness = EngineHarness(
            model_folder,
            backend=backend,
            overlap=overlap,
            max_tokens_per_step=chunk,
            max_batch_size=1,
            tokens_per_block=8,
        )
        number = harness.send(prompt, GREEDY, ONE, prompt_logprobs=TOP)
        harness.run()
        check(harness.prompt_logprobs(number), prompt, oracle, TOP)


@pytest.mark.quick(2)
@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_cached_prefixes_are_computed_again(model_folder, prompts, oracle, backend):
    harness = EngineHarness(model_folder, backend=backend, max_tokens_per_step=64)
    prompt = prompts[5][:200]
    plain = harness.send(prompt, GREEDY, ONE)
    harness.run()
    numbers = [harness.send(prompt[:size], GREEDY, ONE, prompt_logprobs=TOP) for size in (200, 199, 160, 33, 2, 1)]
    cached = harness.send(prompt, GREEDY, ONE)
    harness.run()
    for number, size in zip(numbers, (200, 199, 160, 33, 2, 1), strict=True):
        check(harness.prompt_logprobs(number), prompt[:size], oracle, TOP)
        assert harness.cached_tokens(number) == 0
    assert harness.cached_tokens(cached) > 0
    assert harness.stream(cached).tokens == harness.stream(plain).tokens


@pytest.mark.one_model
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"overlap": True}, marks=pytest.mark.long),
        {"backend": "openvino"},
    ],
    ids=str,
)
def test_preemptions_within_a_prompt_repeat_no_row(model_folder, prompts, oracle, options):
    harness = EngineHarness(
        model_folder, kv_cache_tokens=640, max_tokens_per_step=48, tokens_per_block=16, max_batch_size=16, **options
    )
    long = [prompt[:300] for prompt in prompts[14:38:3]]
    numbers = [
        harness.send(prompt, GREEDY, StopParams(max_tokens=90), prompt_logprobs=1, n=1 + i % 2)
        for i, prompt in enumerate(long)
    ]
    harness.run()
    assert harness.pauses > 0
    for prompt, number in zip(long, numbers, strict=True):
        check(harness.prompt_logprobs(number), prompt, oracle, 1)


def test_requests_with_several_outputs_receive_prompt_logprobs_once(model_folder, prompts, oracle):
    harness = EngineHarness(model_folder, max_tokens_per_step=70)
    number = harness.send(prompts[20], SamplingParams(seed=3), StopParams(max_tokens=5), n=4, prompt_logprobs=2)
    harness.run()
    check(harness.prompt_logprobs(number), prompts[20], oracle, 2)
    assert len({tuple(harness.stream(number, i).tokens) for i in range(4)}) > 1


@pytest.mark.long
@pytest.mark.one_quick_model
def test_two_ranks_return_the_same_logprobs(model_folder, prompts, oracle):
    harness = EngineHarness(model_folder, max_tokens_per_step=100, tensor_parallel=2)
    try:
        number = harness.send(prompts[20], GREEDY, ONE, prompt_logprobs=TOP)
        harness.run()
    finally:
        harness.close()
    check(harness.prompt_logprobs(number), prompts[20], oracle, TOP)
