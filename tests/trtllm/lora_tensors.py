"""Converts a peft adapter to TensorRT-LLM's tensors, like its hf_lora_convert.py."""

import torch
from torch import Tensor

import sluice.trtllm as trtllm

IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}


def lora_config(task_id: int, tensors: dict[str, Tensor], scale: float) -> trtllm.LoraConfig:
    """`tensors`: contents of adapter_model.safetensors. `scale`: the scaling of every module."""
    weights, rows = [], []
    for name in (key for key in tensors if key.endswith("lora_A.weight")):
        *_, layer, _, module, _, _ = name.split(".")
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")] * scale
        weights.append(torch.cat([a.flatten(), b.flatten()]))
        rows.append([IDS[module], int(layer), len(a)])
    return trtllm.LoraConfig(task_id, padded(weights), torch.tensor(rows, dtype=torch.int32))


def padded(rows: list[Tensor]) -> Tensor:
    """The rows, padded to the same length with NaN, which must not be read."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
