"""Quantized checkpoints compute what dense ones of the same values compute, bit for bit."""

from functools import partial

import pytest
import torch
from transformers import LlamaConfig

from engine_worker.layers.shard import UNSHARDED, Shard
from engine_worker.openvino.load import load_openvino
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from engine_worker.runner.weights import fill_weights
from engine_worker.step import Draw, Drawn, Slice, Step
from sluice.checkpoint.errors import CheckpointError
from sluice.wire.params import SamplingParams
from tests.engine_worker.formats.checkpoints import MODELS, ROUND, change_config, write_pair
from tests.engine_worker.formats.packed import FORMATS, Format, pack_config, pack_quantized
from tests.engine_worker.models.checkpoints import open_written
from tests.engine_worker.models.loading import Rank, change, empty_model

LOADERS = {"torch": load_runner, "openvino": partial(load_openvino, warn=lambda *_: None)}

PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def first_token(folder, backend: str, **settings: bool) -> Drawn:
    config = RunnerConfig("cpu", kv_cache_tokens=64, threads=1, **settings)
    runner = LOADERS[backend](open_written(folder), config, lambda *_: None)
    assert (backend == "openvino") == ("matrices" in runner.choices)
    draw = Draw(SamplingParams(temperature=0.0, logprobs=3), 0, 0)
    return runner.run(Step((Slice([5, 6, 7], 0, [0], (draw,)),)))[0]


def weights(folder, shard: Shard) -> dict[str, torch.Tensor]:
    checkpoint = open_written(folder)
    model = empty_model(checkpoint, shard)
    fill_weights(model, checkpoint, RunnerConfig("cpu"), lambda *_: None)
    return model.targets()


@pytest.mark.parametrize("name", ["AWQ", "GPTQ, act-order", "compressed-tensors, 4 bits with zeros", "FP8, blocks"])
def test_the_tokens_and_their_log_probabilities_are_those_of_the_dense_checkpoint(tmp_path, name):
    quantized, dense = write_pair(tmp_path, "qwen3, biased", name)
    assert first_token(quantized, "torch") == first_token(dense, "torch")


@pytest.mark.parametrize("name", FORMATS)
def test_openvino_computes_with_the_codes_as_they_are(tmp_path, name):
    quantized, dense = write_pair(tmp_path, "llama", name)
    expected = first_token(dense, "torch")
    for activations, tolerance in ((False, 1e-4), (True, 0.1)):
        found = first_token(quantized, "openvino", quantized_activations=activations)
        assert found.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=tolerance)
        assert found.token == expected.token


@pytest.mark.parametrize(
    ("model", "name", "excluded"),
    [
        ("qwen3, biased", "AWQ", [f"0.{part}" for part in PROJECTIONS]),
        ("qwen2, tied", "GPTQ, act-order", ["v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("qwen2, tied", "compressed-tensors, 4 bits with zeros", ["1.self_attn.k_proj", "0.mlp.up_proj"]),
    ],
    ids=["a layer is plain", "only queries and keys are not plain", "some parts of products are plain"],
)
def test_some_matrices_are_plain(tmp_path, model, name, excluded):
    """In models with biases, two of them with one table for embedding and head."""
    quantized, dense = write_pair(tmp_path, model, name, excluded)
    expected = first_token(dense, "torch")
    assert first_token(quantized, "torch") == expected
    found = first_token(quantized, "openvino", quantized_activations=False)
    assert found.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=1e-4)
    assert found.token == expected.token


@pytest.mark.parametrize("name", FORMATS)
def test_every_rank_has_its_share_of_the_values(tmp_path, name):
    quantized, dense = write_pair(tmp_path, "llama", name)
    for shard in (UNSHARDED, Rank(0), Rank(1)):
        expected = weights(dense, shard)
        for target, weight in weights(quantized, shard).items():
            assert torch.equal(weight, expected[target]), target


def test_experts(tmp_path):
    quantized, dense = write_pair(tmp_path, "qwen3 moe", "GPTQ", excluded=("q_proj", "experts.3.up_proj"))
    for shard in (UNSHARDED, Rank(1)):
        expected = weights(dense, shard)
        for target, weight in weights(quantized, shard).items():
            assert torch.equal(weight, expected[target]), target


def test_matrices_with_scales_need_no_quantization_config(tmp_path):
    """ModelOpt may write none."""
    quantized, dense = write_pair(tmp_path, "llama", "ModelOpt, FP8")
    change_config(quantized, {"quantization_config": None})
    assert first_token(quantized, "torch") == first_token(dense, "torch")


def test_scales_of_a_quantized_kv_cache_are_ignored(tmp_path):
    quantized, dense = write_pair(tmp_path, "llama", "FP8, blocks")
    names = [f"model.layers.0.self_attn.{name}" for name in ("k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale")]
    change(quantized, lambda tensors: tensors.update({name: torch.tensor(0.5) for name in names}))
    assert first_token(quantized, "torch") == first_token(dense, "torch")


def test_integers_without_a_quantization_config_are_refused(tmp_path):
    quantized, _ = write_pair(tmp_path, "llama", "GPTQ")
    change_config(quantized, {"quantization_config": None})
    with pytest.raises(CheckpointError, match=r"is quantized, but config\.json has no quantization_config"):
        first_token(quantized, "torch")


def test_codes_without_scales_are_refused(tmp_path):
    quantized, _ = write_pair(tmp_path, "llama", "FP8, blocks")
    change(quantized, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight_scale_inv"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj has no weight_scale_inv"):
        first_token(quantized, "torch")


def test_a_part_of_no_matrix_is_named(tmp_path):
    quantized, _ = write_pair(tmp_path, "llama", "GPTQ")
    change(quantized, lambda tensors: tensors.update({"model.layers.0.mlp.extra.scales": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.0\.mlp\.extra\.weight"):
        first_token(quantized, "torch")


@pytest.mark.parametrize("symmetric", [True, False])
def test_an_odd_number_of_inputs(tmp_path, monkeypatch, symmetric):
    """Of the last product of a layer, in a model whose other sizes are even. The groups are odd too, with which
    OpenVINO's products would be wrong."""
    monkeypatch.setitem(MODELS, "odd", LlamaConfig(**{**ROUND, "intermediate_size": 75}))
    odd = Format(partial(pack_quantized, group=15, symmetric=symmetric), pack_config(4))
    monkeypatch.setitem(FORMATS, "odd", odd)
    excluded = [name for name in PROJECTIONS if name != "mlp.down_proj"]
    quantized, dense = write_pair(tmp_path, "odd", "odd", excluded)
    expected = first_token(dense, "torch")
    assert first_token(quantized, "torch") == expected
    for activations, tolerance in ((False, 1e-4), (True, 0.1)):
        found = first_token(quantized, "openvino", quantized_activations=activations)
        assert found.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=tolerance)
        assert found.token == expected.token


def test_the_module_and_the_part_of_another_shape_are_named(tmp_path):
    quantized, _ = write_pair(tmp_path, "llama", "compressed-tensors, int8")
    name = "model.layers.1.mlp.up_proj"
    change(quantized, lambda tensors: tensors.update({f"{name}.weight_scale": torch.ones(95, 1)}))
    message = rf"{name} has a weight_scale of shape \[95, 1\], which does not fit \[96, 64\] weights"
    with pytest.raises(CheckpointError, match=message):
        first_token(quantized, "torch")
