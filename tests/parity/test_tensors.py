"""Tensors equal those of one forward pass of transformers, however the positions are computed."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine_worker.runner import forward
from engine_worker.runner.forward import LEAST_ROWS
from sluice.ring.params import SamplingParams, StopParams
from sluice.ring.tensors import CONTEXT_LOGITS, GENERATION_LOGITS, HIDDEN_STATES, TensorParams
from tests.parity.harness import EngineHarness

GREEDY = SamplingParams(temperature=0.0)
TEN = StopParams(max_tokens=10)
LAYERS = (2, 0)
"""The last of one of the models, which transformers gives after its norm only, and one in the middle of the other."""
NAMES = (HIDDEN_STATES, *(f"layers.{layer}" for layer in LAYERS))
ALL = TensorParams((CONTEXT_LOGITS, *NAMES), (GENERATION_LOGITS, *NAMES))


class Right(NamedTuple):
    """Of every position of some tokens."""

    logits: Tensor
    named: dict[str, Tensor]


Oracle = Callable[[tuple[int, ...]], Right]


@pytest.fixture(scope="module")
def oracle(model_folder) -> Oracle:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    before_norm: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0].clone()))

    @cache
    @torch.inference_mode()
    def of(tokens: tuple[int, ...]) -> Right:
        found = model(torch.tensor([tokens]), output_hidden_states=True)
        states = [each[0] for each in found.hidden_states]
        outputs = [*states[1:-1], before_norm[-1]]
        return Right(found.logits[0], {HIDDEN_STATES: states[-1]} | {f"layers.{i}": outputs[i] for i in LAYERS})

    return of


def near(found: Tensor, right: Tensor) -> bool:
    return found.shape == right.shape and torch.allclose(found, right, atol=2e-3, rtol=1e-3)


def check(harness: EngineHarness, request: int, prompt: list[int], oracle: Oracle, n: int = 1) -> None:
    for index in range(n):
        tokens = harness.stream(request, index).tokens
        right = oracle((*prompt, *tokens[:-1]))
        first = len(prompt) - 1
        assert near(harness.tensor(request, GENERATION_LOGITS, index), right.logits[first:])
        for name in NAMES:
            assert near(harness.tensor(request, name, index), right.named[name][first:]), name
    right = oracle(tuple(prompt))
    assert near(harness.tensor(request, CONTEXT_LOGITS, context=True), right.logits)
    for name in NAMES:
        assert near(harness.tensor(request, name, context=True), right.named[name]), name


@pytest.mark.parametrize("backend", ["torch", "openvino"])
@pytest.mark.parametrize("overlap", [False, True])
def test_each_length_at_once(model_folder, prompts, oracle, overlap, backend):
    """Together with requests that want none."""
    harness = EngineHarness(model_folder, output_layers=LAYERS, backend=backend, overlap=overlap)
    some = [*prompts[:5], *prompts[10:40:6]]
    asked = [(prompt, harness.send(prompt, GREEDY, TEN, tensors=ALL)) for prompt in some]
    others = [harness.send(prompt, GREEDY, TEN) for prompt in some]
    harness.run()
    for i, (prompt, number) in enumerate(asked):
        check(harness, number, prompt, oracle)
        assert harness.stream(number).tokens == harness.stream(others[i]).tokens


@pytest.mark.parametrize("backend", ["torch", "openvino"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows", [1, 50, 1000])
def test_chunk_edges_everywhere(model_folder, prompts, oracle, rows, overlap, backend, monkeypatch):
    """Edges of chunks, of blocks of the cache and of blocks of rows, each at every distance from the others; and of
    what the lane has room for."""
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


def test_what_is_cached_is_computed_again(model_folder, prompts, oracle):
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
    # The prompt's last position is all that its output needs.
    assert harness.cached_tokens(output) == 192
    assert near(
        harness.tensor(output, GENERATION_LOGITS),
        oracle((*prompt, *harness.stream(output).tokens[:-1])).logits[len(prompt) - 1 :],
    )


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"backend": "openvino"}], ids=str)
def test_pauses(model_folder, prompts, oracle, options):
    """What came before the pause is not computed again where it is cached, and never comes twice."""
    harness = EngineHarness(
        model_folder,
        output_layers=LAYERS,
        kv_cache_tokens=640,
        max_tokens_per_step=48,
        tokens_per_block=16,
        max_batch_size=16,
        **options,
    )
    some = [prompt[:300] for prompt in prompts[14:38:2]]
    asked = [
        (prompt, 1 + i % 2, harness.send(prompt, GREEDY, StopParams(max_tokens=120), tensors=ALL, n=1 + i % 2))
        for i, prompt in enumerate(some)
    ]
    harness.run()
    assert harness.pauses > 0
    for prompt, n, number in asked:
        check(harness, number, prompt, oracle, n)


def test_every_output_has_its_own(model_folder, prompts, oracle):
    harness = EngineHarness(model_folder, output_layers=LAYERS, max_tokens_per_step=70)
    number = harness.send(prompts[20], SamplingParams(seed=3), StopParams(max_tokens=5), n=4, tensors=ALL)
    harness.run()
    check(harness, number, prompts[20], oracle, 4)
    assert len({tuple(harness.stream(number, i).tokens) for i in range(4)}) > 1


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"backend": "openvino"}], ids=str)
def test_resume_with_any_rows_missing(model_folder, prompts, oracle, options):
    """Another attempt computes exactly the missing rows, even of an output that is complete."""
    harness = EngineHarness(
        model_folder, output_layers=LAYERS, tokens_per_block=8, max_tokens_per_step=32, max_batch_size=32, **options
    )
    prompt = prompts[12][:50]
    plain = harness.send(prompt, GREEDY, TEN)
    harness.run()
    tokens = harness.stream(plain).tokens
    right, named = oracle((*prompt, *tokens[:-1]))
    first = len(prompt) - 1
    for have in range(len(tokens) + 1):
        for rows in {0, have // 2, max(0, have - 1), have}:
            for context in (0, 17, len(prompt)):
                params = TensorParams(ALL.context, ALL.output, context, {0: rows})
                number = harness.send(prompt, GREEDY, TEN, tensors=params, resume={0: tokens[:have]})
                harness.run()
                assert harness.stream(number).tokens == tokens
                if rows < len(tokens):
                    assert near(harness.tensor(number, GENERATION_LOGITS), right[first + rows :])
                    for name in NAMES:
                        assert near(harness.tensor(number, name), named[name][first + rows :]), name
                if context < len(prompt):
                    found = harness.tensor(number, CONTEXT_LOGITS, context=True)
                    prompts_own = oracle(tuple(prompt))
                    assert near(found, prompts_own.logits[context:])
                    for name in NAMES:
                        rows_found = harness.tensor(number, name, context=True)
                        assert near(rows_found, prompts_own.named[name][context:]), name


def test_two_ranks(model_folder, prompts, oracle):
    harness = EngineHarness(model_folder, output_layers=LAYERS, max_tokens_per_step=100, tensor_parallel=2)
    try:
        number = harness.send(prompts[20], GREEDY, TEN, tensors=ALL)
        harness.run()
    finally:
        harness.close()
    check(harness, number, prompts[20], oracle)
