"""TensorRT-LLM's tensors of LoRA adapters: converted to peft's files, and stored by task id."""

import json
import logging
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import load

import sluice.trtllm as trtllm
from sluice import tiny_model
from sluice.client import AdapterMissing, AdapterNotFound, Overloaded
from sluice.executor import LoRARequest, RequestError, Response
from sluice.trtllm.lora import LoraTasks, not_cached, to_peft
from sluice.trtllm.open_request import OpenRequest, RowWidths
from sluice.trtllm.to_request import Translator, Words
from tests.fakes.failures import Failure
from tests.trtllm.lora_tensors import lora_config
from tests.trtllm.running import run

MODEL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def config(rows: list[list[int]], values: int = 4096, fill: float = 0.5) -> trtllm.LoraConfig:
    return trtllm.LoraConfig(5, torch.full((len(rows), values), fill), torch.tensor(rows, dtype=torch.int32))


def test_logits_are_those_of_peft(tmp_path) -> None:
    """The adapter has all modules, of different ranks. Its scaling is part of TensorRT-LLM's weights."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL))
    ranks = {"rank_pattern": {"layers.1.self_attn.k_proj": 2}, "alpha_pattern": {"layers.1.self_attn.k_proj": 6}}
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=MODULES, **ranks))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "original")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        expected = adapted.eval()(ids).logits

    tensors = load_file(tmp_path / "original" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * len(MODULES)
    files = to_peft(lora_config(5, tensors, scale=3.0), MODEL)
    (tmp_path / "adapter_config.json").write_bytes(files.config_json)
    (tmp_path / "adapter_model.safetensors").write_bytes(files.safetensors)
    base = Qwen3ForCausalLM(Qwen3Config(**MODEL)).eval()
    base.load_state_dict(adapted.unload().state_dict())
    with torch.no_grad():
        plain = base(ids).logits
        converted = PeftModel.from_pretrained(base, tmp_path).eval()(ids).logits
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(converted, expected)


def test_files_of_one_rank() -> None:
    files = to_peft(config([[1, 0, 4], [6, 1, 4]]), MODEL)
    assert json.loads(files.config_json) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["down_proj", "q_proj"],
        "bias": "none",
    }
    assert {name: tuple(tensor.shape) for name, tensor in load(files.safetensors).items()} == {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (4, 16),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (32, 4),
        "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight": (4, 24),
        "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight": (16, 4),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_is_preserved(dtype) -> None:
    lora = config([[1, 0, 4]])
    lora.weights = lora.weights.to(dtype)
    assert {tensor.dtype for tensor in load(to_peft(lora, MODEL).safetensors).values()} == {dtype}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ([0, 0, 4], "attn_qkv: give its parts"),
        ([18, 0, 4], "mlp_gate_up: give its parts"),
        ([9, 0, 4], "cross_attn_q"),
        ([13, 0, 4], "moe_h_to_4h"),
        ([21, 0, 4], "shared_expert_gate"),
        ([22, 0, 4], "module id 22"),
        ([-1, 0, 4], "module id -1"),
        ([1, 0, 4, 1], "DoRA"),
    ],
)
def test_unsupported_modules(row, named) -> None:
    with pytest.raises(NotImplementedError, match=named):
        to_peft(config([row]), MODEL)


@pytest.mark.parametrize("columns", [2, 5])
def test_the_number_of_columns_is_checked_at_use(columns) -> None:
    """The constructor does not check it, since TensorRT-LLM's LoraConfig accepts any number of columns."""
    lora = config([[1] * columns])
    with pytest.raises(trtllm.OptionError, match=f"config has {columns} columns, must have 3 or 4"):
        to_peft(lora, MODEL)


@pytest.mark.parametrize(
    ("rows", "values", "named"),
    [
        ([[1, 2, 4]], 4096, "layer of attn_q is 2, must be from 0 to 1"),
        ([[1, -1, 4]], 4096, "layer of attn_q is -1"),
        ([[1, 0, 0]], 4096, "adapter size of attn_q in layer 0 is 0"),
        ([[1, 0, 5]], 4 * 48, "is 5, must be at least 1 and at most 4"),
        ([[1, 0, 4], [1, 0, 4]], 4096, r"two rows for the same layer and module, 0\.self_attn\.q_proj"),
        ([], 4096, "no rows"),
    ],
)
def test_values_out_of_range(rows, values, named) -> None:
    lora = trtllm.LoraConfig(5, torch.ones(len(rows), values), torch.tensor(rows).reshape(len(rows), 3))
    with pytest.raises(trtllm.OptionError, match=named):
        to_peft(lora, MODEL)


def test_unsupported_dtypes_and_models() -> None:
    lora = config([[1, 0, 4]])
    with pytest.raises(NotImplementedError, match=r"config\.json has no 'hidden_size'"):
        to_peft(lora, {"num_hidden_layers": 2})
    lora.weights = lora.weights.int()
    with pytest.raises(trtllm.OptionError, match=r"torch\.int32, must be one of float32"):
        to_peft(lora, MODEL)


@pytest.mark.parametrize(
    ("weights", "rows", "message"),
    [
        (torch.ones(1, 4), None, "must also have lora config"),
        (torch.ones(1, 1, 4), torch.ones(1, 3), "Expected weights tensor to have 2 dimensions"),
        (torch.ones(1, 4), torch.ones(3), "Expected config tensor to have 2 dimensions"),
        (torch.ones(2, 4), torch.ones(1, 3), "Expected dim 0 of lora weights and lora config to have the same size"),
    ],
)
def test_shapes(weights, rows, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        trtllm.LoraConfig(1, weights, rows)


def test_a_task_id_is_free_after_its_weights_were_refused() -> None:
    tasks = LoraTasks(MODEL)
    refused = tasks.find(config([[1, 0, 4]]))
    tasks.mark_refused(refused)
    assert tasks.find(trtllm.LoraConfig(5)) == refused
    other = tasks.find(config([[1, 0, 4]], fill=0.25))
    assert (other.name, other.path != refused.path) == ("5", True)
    tasks.mark_refused(refused)
    with pytest.raises(trtllm.OptionError, match="task_id 5 already has other weights"):
        tasks.find(config([[1, 0, 4]]))


def test_a_task_id_is_free_after_the_upload_of_its_weights_was_refused(scripted, script) -> None:
    """The executor tells the tasks, which know nothing of the server."""

    def weights(fill: float) -> trtllm.LoraConfig:
        return trtllm.LoraConfig(5, torch.full((1, 4096), fill), torch.tensor([[1, 0, 4]]))

    script.failure = Failure(grpc.StatusCode.INVALID_ARGUMENT, "rank 4 is too high")
    (refused,) = run(scripted, lora_config=weights(0.5))
    assert "rank 4 is too high" in refused.error_msg
    script.failure = None
    assert not any(response.has_error() for response in run(scripted, lora_config=weights(0.25)))
    with pytest.raises(trtllm.OptionError, match="task_id 5 already has other weights"):
        run(scripted, lora_config=weights(0.5))


def test_weights_are_sent_once() -> None:
    tasks = LoraTasks(MODEL)
    assert tasks.find(trtllm.LoraConfig(5)) == LoRARequest("5", 5)
    first = tasks.find(config([[1, 0, 4]]))
    assert (first.name, first.adapter_id) == ("5", 5)
    assert {file.name for file in Path(first.path).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert tasks.find(trtllm.LoraConfig(5)) == tasks.find(config([[1, 0, 4]])) == first
    with pytest.raises(trtllm.OptionError, match="task_id 5 already has other weights"):
        tasks.find(config([[1, 0, 4]], fill=0.25))
    tasks.close()
    assert not Path(first.path).exists()


def test_a_folder_of_adapters(tmp_path, caplog) -> None:
    """The folder may contain TensorRT-LLM's files or peft's."""
    lora = config([[1, 0, 4]])
    for name in ("0", "12", "other"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "0" / "model.lora_weights.npy", lora.weights[None].numpy())
    np.save(tmp_path / "0" / "model.lora_config.npy", lora.config[None].numpy())
    (tmp_path / "12" / "adapter_config.json").write_text("{}")
    with caplog.at_level(logging.WARNING, "sluice.trtllm"):
        tasks = LoraTasks(MODEL, str(tmp_path))
    assert ["skipping other" in record.message for record in caplog.records] == [True]
    assert tasks.find(trtllm.LoraConfig(12)) == LoRARequest("12", 12, str(tmp_path / "12"))
    stored = Path(tasks.find(trtllm.LoraConfig(0)).path)
    assert (stored / "adapter_model.safetensors").read_bytes() == to_peft(lora, MODEL).safetensors
    (tmp_path / "7").mkdir()
    with pytest.raises(trtllm.OptionError, match=r"cannot load an adapter from .*7: "):
        LoraTasks(MODEL, str(tmp_path))
    with pytest.raises(trtllm.OptionError, match="must be a folder"):
        LoraTasks(MODEL, str(tmp_path / "none"))


def test_pickled_arrays_are_refused(tmp_path) -> None:
    (tmp_path / "3").mkdir()
    for name in ("model.lora_weights.npy", "model.lora_config.npy"):
        np.save(tmp_path / "3" / name, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(trtllm.OptionError, match="allow_pickle"):
        LoraTasks(MODEL, str(tmp_path))


@pytest.mark.parametrize("kind", [AdapterNotFound, AdapterMissing])
def test_unknown_adapters_have_tensorrt_llms_error_message(kind) -> None:
    def message(error: Exception, **options) -> str:
        request = OpenRequest(trtllm.Request([1], 1, **options), 1, 0.0, RowWidths(8, 4))
        failed = Response(1, None, error=RequestError(1, None, error))
        (response,) = request.read(None, failed, 1)
        return response.error_msg

    expected = "LoRA task 10 not found in cache. Please send LoRA weights with request"
    assert message(kind("lora_id is '10'"), lora_config=trtllm.LoraConfig(10)) == expected == not_cached(10)
    assert message(kind("spec.model is '10'")) == "spec.model is '10'"
    assert message(Overloaded("full"), lora_config=trtllm.LoraConfig(10)) == "full"


def test_a_request_names_its_task() -> None:
    tasks = LoraTasks(MODEL)
    translator = Translator(Words(tiny_model.path() / "tokenizer.json"), 4096, 1, tasks)
    for lora in (trtllm.LoraConfig(5), config([[1, 0, 4]]), trtllm.LoraConfig(5)):
        translated = translator.translate(trtllm.Request([1], 1, lora_config=lora))
        assert translated.lora_request == tasks.find(trtllm.LoraConfig(5))
        assert translated.client_options("id")["lora_id"] == "5"
    assert translator.translate(trtllm.Request([1], 1)).lora_request is None
