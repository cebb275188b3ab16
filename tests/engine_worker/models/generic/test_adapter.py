"""Logits through the adapter against transformers' own forward pass."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Model, OlmoForCausalLM, RobertaConfig
from transformers.models.olmo import modeling_olmo
from transformers.models.starcoder2 import modeling_starcoder2

from engine_worker.layers.shard import Place, Shard
from engine_worker.models.generic.model import Adapter
from engine_worker.models.registry import find_model
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from sluice.checkpoint.errors import CheckpointError
from tests.engine_worker.models.checkpoints import CONFIGS, open_written, write_checkpoint
from tests.engine_worker.models.foreign import ADAPTED, PLAIN, REFUSED, SLIDING, UNWINDOWED, WINDOWED
from tests.engine_worker.models.logits import logprobs_of

LENGTHS = (1, 2, 15, 16, 33, 70, 300)
CPU = torch.device("cpu")


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def runner_of(folder, **options):
    config = RunnerConfig("cpu", kv_cache_tokens=1024, threads=1, **options)
    return load_runner(open_written(folder), config, lambda *_: None)


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(97, (length,), generator=random).tolist() for length in LENGTHS]


@torch.inference_mode()
def check(runner, model) -> None:
    for prompt, logprobs in zip(prompts(), logprobs_of(runner, prompts()), strict=True):
        expected = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(dim=-1)
        torch.testing.assert_close(logprobs, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.quick(10)
@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_logits_equal_transformers(tmp_path, name):
    model = write_checkpoint(tmp_path, ADAPTED[name])
    runner = runner_of(tmp_path)
    assert runner.choices["implementation"] == "transformers"
    check(runner, model)


@pytest.mark.parametrize("name", ["gemma3", "deepseek v3", "opt", "granite"])
def test_logits_equal_transformers_with_the_reference_backend(tmp_path, name):
    model = write_checkpoint(tmp_path, ADAPTED[name])
    check(runner_of(tmp_path, attention="reference"), model)


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "granite", "mixtral"])
def test_half_precision_stays_close(tmp_path, name):
    model = write_checkpoint(tmp_path, ADAPTED[name])
    prompt = list(range(40))
    with torch.inference_mode():
        exact = model(torch.tensor([prompt])).logits[0, -1].log_softmax(dim=-1)
        half = model.bfloat16()(torch.tensor([prompt])).logits[0, -1].float().log_softmax(dim=-1)
    logprobs = logprobs_of(runner_of(tmp_path, dtype="bfloat16", attention="reference"), [prompt])[0]
    assert (logprobs - exact).abs().mean() < 2 * (half - exact).abs().mean() + 0.02


@pytest.mark.parametrize("name", CONFIGS)
def test_the_adapter_serves_natively_implemented_architectures_too(tmp_path, monkeypatch, name):
    model = write_checkpoint(tmp_path, CONFIGS[name])
    monkeypatch.setattr("engine_worker.models.registry.MODELS", {})
    runner = runner_of(tmp_path)
    assert runner.choices["implementation_reason"].startswith("Sluice has no native implementation of ")
    check(runner, model)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architectures_are_refused(tmp_path, name):
    config, words = REFUSED[name]
    write_checkpoint(tmp_path, config)
    with pytest.raises(CheckpointError, match=words):
        find_model(config_of(tmp_path))


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_are_read_from_the_masks(tmp_path, name):
    config = WINDOWED[name]
    write_checkpoint(tmp_path, config)
    kinds = getattr(config, "layer_types", None) or [SLIDING] * config.num_hidden_layers
    windows = Adapter.read_config(config_of(tmp_path)).windows
    assert windows == tuple(20 if kind == SLIDING else None for kind in kinds)
    assert 20 in windows


def test_a_window_as_wide_as_the_context_becomes_none(tmp_path):
    write_checkpoint(tmp_path, WINDOWED["starcoder2"])
    raw = config_of(tmp_path)
    assert Adapter.read_config(raw | {"sliding_window": 511}).windows == (511, 511)
    assert Adapter.read_config(raw | {"sliding_window": 512}).windows == (None, None)
    assert Adapter.read_config(raw | {"sliding_window": None}).windows == (None, None)


def test_a_window_without_a_mask_is_refused(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, WINDOWED["starcoder2"])
    monkeypatch.setattr(modeling_starcoder2, "create_sliding_window_causal_mask", lambda **_: None)
    with pytest.raises(CheckpointError, match="has a sliding window without a mask"):
        Adapter.read_config(config_of(tmp_path))


def test_a_limit_narrows_the_windows(tmp_path):
    write_checkpoint(tmp_path, UNWINDOWED["olmo"])
    runner = runner_of(tmp_path, max_attention_window=(24,))
    assert runner.window == 24
    prompt = prompts()[-1]
    (whole,), (narrow,) = logprobs_of(runner_of(tmp_path), [prompt]), logprobs_of(runner, [prompt])
    assert not torch.allclose(whole, narrow, atol=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "unheard"}, "model_type 'unheard' is unknown to transformers"),
        ({"model_type": None}, "model_type 'None' is unknown"),
        (
            {"architectures": ["OlmoForSequenceClassification"]},
            r"architectures \(OlmoForSequenceClassification\) names no causal language model of model_type 'olmo'",
        ),
        ({"architectures": None}, r"without architectures in config.json.*architectures \(empty\) names no causal"),
        ({"num_hidden_layers": "two"}, "is not a valid olmo configuration"),
        ({"is_encoder_decoder": True}, "has an encoder"),
    ],
)
def test_invalid_configurations_are_refused(tmp_path, change, words):
    write_checkpoint(tmp_path, UNWINDOWED["olmo"])
    with pytest.raises(CheckpointError, match=words):
        find_model(config_of(tmp_path) | change)


def test_the_reasons_against_both_implementations_are_reported(tmp_path):
    write_checkpoint(tmp_path, CONFIGS["llama"])
    with pytest.raises(CheckpointError, match=r"rope type 'dynamic' is not supported.*with transformers: rope type"):
        find_model(config_of(tmp_path) | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})


def test_more_than_one_rank_is_refused(tmp_path):
    class OneOfTwo(Shard):
        size = 2

    write_checkpoint(tmp_path, UNWINDOWED["olmo"])
    with pytest.raises(ValueError, match="tensor_parallel = 2, but OlmoForCausalLM runs through transformers"):
        Adapter(Adapter.read_config(config_of(tmp_path)), None, Place(torch.float32, CPU, OneOfTwo()))


def test_output_layers_are_refused(tmp_path):
    write_checkpoint(tmp_path, UNWINDOWED["olmo"])
    config = RunnerConfig("cpu", kv_cache_tokens=256, output_layers=(0,))
    with pytest.raises(ValueError, match="output_layers: this model runs through transformers"):
        load_runner(open_written(tmp_path), config, lambda *_: None)


class Recurrent(torch.nn.Module):
    """Adds half of the previous token's state to each token's."""

    def forward(self, x):
        return x + 0.5 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def test_mixing_tokens_outside_attention_is_detected(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, UNWINDOWED["olmo"])
    build = OlmoForCausalLM.__init__

    def init(self, config):
        build(self, config)
        self.model.norm = torch.nn.Sequential(self.model.norm, Recurrent())

    monkeypatch.setattr(OlmoForCausalLM, "__init__", init)
    with pytest.raises(CheckpointError, match="mixes tokens outside attention"):
        runner_of(tmp_path, weights="random")


def test_a_module_that_counts_positions_itself_is_detected(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, UNWINDOWED["gpt2"])
    forward = GPT2Model.forward
    monkeypatch.setattr(GPT2Model, "forward", lambda self, position_ids=None, **options: forward(self, **options))
    with pytest.raises(CheckpointError, match="counts positions itself"):
        runner_of(tmp_path)


def test_counts_that_matter_only_in_large_steps_are_detected(tmp_path, monkeypatch):
    """Like Llama 4's attention temperature, which is 1 in the first 8191 rows."""
    write_checkpoint(tmp_path, UNWINDOWED["olmo"])
    rotate = modeling_olmo.apply_rotary_pos_emb

    def with_temperature(query, *args):
        rows = torch.arange(query.shape[2], device=query.device)
        scale = torch.log1p(torch.floor((rows.float() + 1) / 8192)) * 0.1 + 1
        query, key = rotate(query, *args)
        return (query * scale[:, None]).to(key.dtype), key

    runner_of(tmp_path)
    monkeypatch.setattr(modeling_olmo, "apply_rotary_pos_emb", with_temperature)
    with pytest.raises(CheckpointError, match="OlmoForCausalLM uses the number of tokens in a step"):
        Adapter.read_config(config_of(tmp_path))


def test_positions_that_do_not_begin_at_0_are_detected(tmp_path):
    """RoBERTa's positions begin after the id of its padding token."""
    write_checkpoint(tmp_path, RobertaConfig(**PLAIN | {"pad_token_id": 1}, is_decoder=True, type_vocab_size=1))
    with pytest.raises(CheckpointError, match="RobertaForCausalLM does not count positions from 0"):
        runner_of(tmp_path)


def test_sharded_weights_and_progress(tmp_path):
    model = write_checkpoint(tmp_path, UNWINDOWED["olmo2"], shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    calls = []
    config = RunnerConfig("cpu", kv_cache_tokens=1024, threads=1)
    check(load_runner(open_written(tmp_path), config, lambda *call: calls.append(call)), model)
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert len(calls) > 10
    assert calls[-1] == (calls[0][1], calls[0][1])


def change_weights(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_and_unexpected_weights_are_named(tmp_path):
    write_checkpoint(tmp_path, UNWINDOWED["olmo"])

    def swap(tensors):
        tensors["model.layers.0.mlp.extra.weight"] = tensors.pop("model.layers.1.self_attn.k_proj.weight").clone()

    change_weights(tmp_path, swap)
    with pytest.raises(CheckpointError) as caught:
        runner_of(tmp_path)
    assert "missing: model.layers.1.self_attn.k_proj.weight;" in str(caught.value)
    assert "unexpected: model.layers.0.mlp.extra.weight" in str(caught.value)


@pytest.mark.parametrize("broken", [b"no tensors here", None])
def test_broken_and_absent_weights_are_refused(tmp_path, broken):
    write_checkpoint(tmp_path, UNWINDOWED["olmo"])
    file = tmp_path / "model.safetensors"
    file.unlink()
    if broken is not None:
        file.write_bytes(broken)
    with pytest.raises(CheckpointError, match="transformers cannot load"):
        runner_of(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path):
    write_checkpoint(tmp_path, UNWINDOWED["olmo"])
    change_weights(tmp_path, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(97, 40)}))
    with pytest.raises(CheckpointError, match="transformers cannot load"):
        runner_of(tmp_path)


def test_random_weights_follow_their_seed(tmp_path):
    write_checkpoint(tmp_path, UNWINDOWED["gpt neox"])
    (tmp_path / "model.safetensors").unlink()
    first, same, different = (
        logprobs_of(runner_of(tmp_path, weights="random", weights_seed=seed), [[5, 6, 7]])[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, different)
