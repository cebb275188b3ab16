"""Returned tensors equal those of one forward pass of transformers, for any batching and chunking."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine_worker.runner import forward
from engine_worker.runner.forward import LEAST_ROWS
from sluice.wire.params import SamplingParams, StopParams
from sluice.wire.tensors import CONTEXT_LOGITS, GENERATION_LOGITS, HIDDEN_STATES, TensorParams
from tests.parity.harness import EngineHarness

GREEDY = SamplingParams(temperature=0.0)
TEN = StopParams(max_tokens=10)
LAYERS = (2, 0)
"""The last layer of one of the models, whose output transformers returns only after the norm, and the first layer."""
NAMES = (HIDDEN_STATES, *(f"layers.{layer}" for layer in LAYERS))
ALL = TensorParams((CONTEXT_LOGITS, *NAMES), (GENERATION_LOGITS, *NAMES))


class Expected(NamedTuple):
    """The tensors of all positions of some tokens."""

    logits: Tensor
    named: dict[str, Tensor]


Oracle = Callable[[tuple[int, ...]], Expected]


@pytest.fixture(scope="module")
def oracle(model_folder) -> Oracle:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    before_norm: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0].clone()))

    @cache
    @torch.inference_mode()
    def of(tokens: tuple[int, ...]) -> Expected:
        result = model(torch.tensor([tokens]), output_hidden_states=True)
        states = [state[0] for state in result.hidden_states]
        outputs = [*states[1:-1], before_norm[-1]]
        return Expected(result.logits[0], {HIDDEN_STATES: states[-1]} | {f"layers.{i}": outputs[i] for i in LAYERS})

    return of


def near(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and torch.allclose(actual, expected, atol=2e-3, rtol=1e-3)


def check(harness: EngineHarness, request: int, prompt: list[int], oracle: Oracle, n: int = 1) -> None:
    for index in range(n):
        tokens = harness.stream(request, index).tokens
        expected = oracle((*prompt, *tokens[:-1]))
        first = len(prompt) - 1
        assert near(harness.tensor(request, GENERATION_LOGITS, index), expected.logits[first:])
        for name in NAMES:
            assert near(harness.tensor(request, name, index), expected.named[name][first:]), name
    expected = oracle(tuple(prompt))
    assert near(harness.tensor(request, CONTEXT_LOGITS, context=True), expected.logits)
    for name in NAMES:
        assert near(harness.tensor(request, name, context=True), expected.named[name]), name


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("overlap", "backend"),
    [
        (False, "torch"),
        (True, "openvino"),
        pytest.param(True, "torch", marks=pytest.mark.long),
        pytest.param(False, "openvino", marks=pytest.mark.long),
    ],
)
def test_prompts_of_all_lengths_share_a_batch_with_requests_without_tensors(
    model_folder, prompts, oracle, overlap, backend
):
    harness = EngineHarness(model_folder, output_layers=LAYERS, backend=backend, overlap=overlap)
    selected = [*prompts[:5], *prompts[10:40:6]]
    numbers = [harness.send(prompt, GREEDY, TEN, tensors=ALL) for prompt in selected]
    plain = [harness.send(prompt, GREEDY, TEN) for prompt in selected]
    harness.run()
    for i, (prompt, number) in enumerate(zip(selected, numbers, strict=True)):
        check(harness, number, prompt, oracle)
        assert harness.stream(number).tokens == harness.stream(plain[i]).tokens


@pytest.mark.long
@pytest.mark.one_model
@pytest.mark.parametrize(
    ("rows", "overlap", "backend"),
    [
        pytest.param(1, True, "torch", marks=pytest.mark.long),
        pytest.param(1, False, "openvino", marks=pytest.mark.long),
        (50, True, "torch"),
        pytest.param(50, True, "openvino", marks=pytest.mark.long),
        pytest.param(1000, False, "torch", marks=pytest.mark.long),
    ],
)
def test_chunks_may_end_anywhere(model_folder, prompts, oracle, rows, overlap, backend, monkeypatch):
    """At any distance from the ends of KV cache blocks and of blocks of rows, and for any capacity of the lane."""
    monkeypatch.setattr(forward, "BLOCK_BYTES", 0)
    prompt = prompts[5][: 2 * LEAST_ROWS + 3]
    for chunk in (1, 2, 7, 31, 32, 33, LEAST_ROWS - 1, LEAST_ROWS + 1, len(prompt) - 1, 512):
        harness = EngineHarness(
            model_folder,
            output_layers=LAYERS,
            backend=backend,
            overlap=overlap,
            max_tokens_per_step=chunk,
            max_batch_size=1,
            tokens_per_block=8,
            tensor_buffer=rows * 4096 * 4,
        )
        number = harness.send(prompt, GREEDY, StopParams(max_tokens=3), tensors=ALL, prompt_logprobs=1)
        harness.run()
        check(harness, number, prompt, oracle)
        assert len(harness.prompt_logprobs(number)) == len(prompt) - 1


def test_cached_prefixes_are_computed_again_for_rows_of_the_prompt(model_folder, prompts, oracle):
    harness = EngineHarness(model_folder, output_layers=LAYERS, max_tokens_per_step=64)
    prompt = prompts[5][:200]
    harness.send(prompt, GREEDY, TEN)
    harness.run()
    numbers = [harness.send(prompt[:size], GREEDY, TEN, tensors=ALL) for size in (200, 199, 33, 2, 1)]
    output = harness.send(prompt, GREEDY, TEN, tensors=TensorParams(output=(GENERATION_LOGITS,)))
    harness.run()
    for number, size in zip(numbers, (200, 199, 33, 2, 1), strict=True):
        check(harness, number, prompt[:size], oracle)
        assert harness.cached_tokens(number) == 0
    # Rows of the output need only the prompt's last position.
    assert harness.cached_tokens(output) == 192
    assert near(
        harness.tensor(output, GENERATION_LOGITS),
        oracle((*prompt, *harness.stream(output).tokens[:-1])).logits[len(prompt) - 1 :],
    )


@pytest.mark.one_model
@pytest.mark.parametrize(
    "options",
    [*(pytest.param(options, marks=pytest.mark.long) for options in ({}, {"overlap": True})), {"backend": "openvino"}],
    ids=str,
)
def test_preemptions_repeat_no_row(model_folder, prompts, oracle, options):
    harness = EngineHarness(
        model_folder,
        output_layers=LAYERS,
        kv_cache_tokens=640,
        max_tokens_per_step=48,
        tokens_per_block=16,
        max_batch_size=16,
        **options,
    )
    long = [prompt[:300] for prompt in prompts[14:38:3]]
    numbers = [
        harness.send(prompt, GREEDY, StopParams(max_tokens=90), tensors=ALL, n=1 + i % 2)
        for i, prompt in enumerate(long)
    ]
    harness.run()
    assert harness.pauses > 0
    for i, (prompt, number) in enumerate(zip(long, numbers, strict=True)):
        check(harness, number, prompt, oracle, 1 + i % 2)


def test_every_output_has_its_own_rows(model_folder, prompts, oracle):
    harness = EngineHarness(model_folder, output_layers=LAYERS, max_tokens_per_step=70)
    number = harness.send(prompts[20], SamplingParams(seed=3), StopParams(max_tokens=5), n=4, tensors=ALL)
    harness.run()
    check(harness, number, prompts[20], oracle, 4)
    assert len({tuple(harness.stream(number, i).tokens) for i in range(4)}) > 1


@pytest.mark.quick(1)
@pytest.mark.one_model
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.long), {"overlap": True}, {"backend": "openvino"}], ids=str
)
def test_a_resumed_request_computes_exactly_the_missing_rows(model_folder, prompts, oracle, options):
    """Even of an output that is complete."""
    harness = EngineHarness(
        model_folder, output_layers=LAYERS, tokens_per_block=8, max_tokens_per_step=32, max_batch_size=32, **options
    )
    prompt = prompts[12][:50]
    plain = harness.send(prompt, GREEDY, TEN)
    harness.run()
    tokens = harness.stream(plain).tokens
    of_output, of_prompt = oracle((*prompt, *tokens[:-1])), oracle(tuple(prompt))
    first = len(prompt) - 1
    for resumed in (0, 1, 2, 7, len(tokens) - 1, len(tokens)):
        for rows in {0, resumed // 2, max(0, resumed - 1), resumed}:
            for context in (0, 17, len(prompt)):
                params = TensorParams(ALL.context, ALL.output, context, {0: rows})
                number = harness.send(prompt, GREEDY, TEN, tensors=params, resume={0: tokens[:resumed]})
                harness.run()
                assert harness.stream(number).tokens == tokens
                if rows < len(tokens):
                    assert near(harness.tensor(number, GENERATION_LOGITS), of_output.logits[first + rows :])
                    for name in NAMES:
                        assert near(harness.tensor(number, name), of_output.named[name][first + rows :]), name
                if context < len(prompt):
                    logits = harness.tensor(number, CONTEXT_LOGITS, context=True)
                    assert near(logits, of_prompt.logits[context:])
                    for name in NAMES:
                        tensor = harness.tensor(number, name, context=True)
                        assert near(tensor, of_prompt.named[name][context:]), name


@pytest.mark.long
def test_two_ranks_return_the_same_rows(model_folder, prompts, oracle):
    harness = EngineHarness(model_folder, output_layers=LAYERS, max_tokens_per_step=100, tensor_parallel=2)
    try:
        number = harness.send(prompts[20], GREEDY, TEN, tensors=ALL)
        harness.run()
    finally:
        harness.close()
    check(harness, number, prompts[20], oracle)
