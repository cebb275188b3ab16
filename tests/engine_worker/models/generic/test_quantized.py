"""Quantized checkpoints in transformers' modules: what dense ones of the same values compute, bit for bit."""

import pytest
import torch

from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from sluice.checkpoint.errors import CheckpointError
from tests.engine_worker.formats.checkpoints import write_pair
from tests.engine_worker.models.checkpoints import open_written
from tests.engine_worker.models.loading import change
from tests.engine_worker.models.logits import logprobs_of

PROMPTS = [[5, 6, 7], list(range(40))]


def logprobs(folder) -> list[torch.Tensor]:
    runner = load_runner(open_written(folder), RunnerConfig("cpu", kv_cache_tokens=256, threads=1), lambda *_: None)
    assert runner.choices["implementation"] == "transformers"
    return logprobs_of(runner, PROMPTS)


@pytest.mark.parametrize("model", ["olmo", "starcoder2"])
@pytest.mark.parametrize("name", ["AWQ", "GPTQ, act-order", "FP8, blocks"])
def test_it_computes_what_the_dense_checkpoint_does(tmp_path, model, name):
    quantized, dense = write_pair(tmp_path, model, name)
    for found, expected in zip(logprobs(quantized), logprobs(dense), strict=True):
        assert torch.equal(found, expected)


def test_the_bytes_read_are_reported(tmp_path):
    quantized, _ = write_pair(tmp_path, "olmo", "AWQ")
    reports = []
    config = RunnerConfig("cpu", kv_cache_tokens=64, threads=1)
    load_runner(open_written(quantized), config, lambda *report: reports.append(report))
    assert reports == sorted(reports)
    assert reports[-1][0] == reports[-1][1] == (quantized / "model.safetensors").stat().st_size
    assert len(reports) > 10


@pytest.mark.parametrize(
    ("model", "name"),
    [("gpt2", r"transformer\.h\.0\.attn\.c_proj\.weight"), ("qwen2 moe", r"mlp\.experts\.0\.\w+_proj\.weight")],
    ids=["transposed", "experts, which are one tensor in the module"],
)
def test_other_quantized_weights_are_refused(tmp_path, model, name):
    quantized, _ = write_pair(tmp_path, model, "FP8, blocks")
    with pytest.raises(CheckpointError, match=f"{name} is quantized, but in transformers' module it is no matrix"):
        logprobs(quantized)


def test_codes_without_a_scale_are_refused(tmp_path):
    quantized, _ = write_pair(tmp_path, "olmo", "FP8, blocks")
    change(quantized, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight_scale_inv"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj.*scale"):
        logprobs(quantized)
