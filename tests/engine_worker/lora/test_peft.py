"""Alone and together, requests get the tokens and log-probabilities that peft computes."""

import pytest
import torch

from engine_worker.lora.checkpoint import read_adapter
from sluice.wire.params import Speculation
from tests.engine_worker.lora.engines import BACKENDS, OPENVINO, finish, lora_engine, submit
from tests.engine_worker.lora.oracle import ATTENTION, MLP, Oracle, adapter_of, files_of, write_adapter
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint

ADAPTERS = {
    "all": {"rank": 8},
    "attention": {"rank": 3, "targets": ATTENTION},
    "mlp": {"rank": 16, "targets": MLP, "use_rslora": True},
    "one": {"rank": 1, "targets": ("v_proj",), "lora_alpha": 3},
    "large": {"rank": 64, "targets": ("q_proj", "up_proj", "down_proj")},
    "patterns": {
        "rank": 4,
        "rank_pattern": {"q_proj": 9, "layers.1.mlp.down_proj": 17},
        "alpha_pattern": {"k_proj": 32, "model.layers.0.self_attn.o_proj": 5},
    },
    "layers": {"rank": 5, "layers_to_transform": [1]},
}
CLOSE = {"rel": 1e-4, "abs": 2e-4}


@pytest.fixture(scope="module")
def adapters(model):
    return {
        name: write_adapter(model.parent / name, model, seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }


def prompt(seed: int, size: int = 11) -> list[int]:
    return [(seed * 37 + i * i * 11 + i) % 97 for i in range(size)]


def check(bench, oracle, submitted, count: int = 8) -> None:
    """`submitted`: by request, its prompt and its adapter's folder."""
    finish(bench)
    for number, (tokens, folder) in submitted.items():
        expected, scores = oracle.greedy(folder, tokens, count)
        stream = bench.stream(number)
        assert stream.end.fault is None, stream.end.fault
        assert stream.tokens == expected
        assert [token.logprob for token in stream.logprobs] == pytest.approx(scores, **CLOSE)


@pytest.mark.parametrize("name", ADAPTERS)
def test_alone(model, oracle, adapters, name):
    bench = lora_engine(model)
    tokens, folder = prompt(3), adapters[name]
    check(bench, oracle, {submit(bench, tokens, adapter_of(folder), logprobs=0): (tokens, folder)})
    # The adapter matters: without it the logits differ.
    assert not torch.allclose(oracle.logits(folder, tokens), oracle.logits(None, tokens), atol=1e-3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sixteen_requests_with_several_adapters_and_none(model, oracle, adapters, backend):
    bench, submitted = lora_engine(model, backend=backend), {}
    chosen = [adapters["all"], None, adapters["large"], adapters["patterns"], adapters["mlp"]]
    for i in range(16):
        tokens, folder = prompt(i, 5 + 7 * (i % 4)), chosen[i % len(chosen)]
        adapter = None if folder is None else adapter_of(folder)
        submitted[submit(bench, tokens, adapter, logprobs=0)] = tokens, folder
    check(bench, oracle, submitted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts(model, oracle, adapters, backend):
    """With right draft tokens and a wrong one, the output is the same as without drafts, in fewer steps."""
    bench, folder, tokens = lora_engine(model, backend=backend), adapters["all"], prompt(5)
    drafted, _ = oracle.greedy(folder, tokens, 8)
    drafted[5] = (drafted[5] + 1) % 97
    number = submit(bench, tokens, adapter_of(folder), logprobs=0, speculation=Speculation(3, tuple(drafted)))
    launched, launch = [], bench.runner.launch
    bench.runner.launch = lambda step: launched.append(step) or launch(step)
    check(bench, oracle, {number: (tokens, folder)})
    assert any(part.drafts and part.adapter_slot for step in launched for part in step.slices)
    assert len(launched) < 8


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("qwen3, biased", "torch"),
        ("llama, biased, linear rope", "torch"),
        ("qwen2, half windowed", "torch"),
        pytest.param("qwen2, half windowed", *OPENVINO.values, marks=OPENVINO.marks),
    ],
)
def test_other_models(tmp_path, name, backend):
    model = tmp_path / "model"
    write_checkpoint(model, CONFIGS[name])
    folder = write_adapter(tmp_path / "tuned", model, rank=6)
    bench, tokens = lora_engine(model, backend=backend), prompt(1, 40)
    check(bench, Oracle(model), {submit(bench, tokens, adapter_of(folder), logprobs=0): (tokens, folder)})


def test_scaling_is_folded_into_b(model, adapters):
    bench = lora_engine(model)
    targets = bench.runner.adapters._targets
    weights = read_adapter(files_of(adapters["patterns"]), targets, 64, torch.float32)
    assert {module.target.name: module.rank for module in weights.modules if module.target.layer == 0}["q_proj"] == 9
    assert weights.rank == 17
    assert len(weights.modules) == 14
