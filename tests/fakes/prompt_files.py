"""Prompt-tuning checkpoints in peft's format, valid and malformed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def some_rows(seed: int, rows: int = 3, hidden_size: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, (rows, hidden_size)).astype(np.float32)


def config_of(rows: np.ndarray, **options: Any) -> bytes:
    sizes = {"num_virtual_tokens": rows.shape[0], "token_dim": rows.shape[1]}
    return json.dumps({"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", **sizes, **options}).encode()


def weights_of(rows: np.ndarray, name: str = "prompt_embeddings") -> bytes:
    return bytes(save({name: rows}, metadata={"format": "pt"}))


def write(folder: Path, rows: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_bytes(config_of(rows))
    (folder / WEIGHTS).write_bytes(weights_of(rows))
    return folder


_ROWS = some_rows(0)
BAD_FILES = {
    "another kind": (
        config_of(_ROWS, peft_type="PREFIX_TUNING"),
        weights_of(_ROWS),
        "must be PROMPT_TUNING (got 'PREFIX_TUNING')",
    ),
    "lora": (config_of(_ROWS, peft_type="LORA"), weights_of(_ROWS), "(got 'LORA')"),
    "no kind": (b"{}", weights_of(_ROWS), "(got None)"),
    "not json": (b"\x80\x05", weights_of(_ROWS), "not a JSON object"),
    "not text": (b'{"\xff": 1}', weights_of(_ROWS), "not a JSON object"),
    "deep json": (b"[" * 100_000, weights_of(_ROWS), "not a JSON object"),
    "an unknown option": (config_of(_ROWS, magic=3), weights_of(_ROWS), "'magic' = 3 is not supported"),
    "an encoder": (config_of(_ROWS, num_transformer_submodules=2), weights_of(_ROWS), "num_transformer_submodules"),
    "modules": (config_of(_ROWS, modules_to_save=["lm_head"]), weights_of(_ROWS), "modules_to_save"),
    "another count": (config_of(_ROWS, num_virtual_tokens=4), weights_of(_ROWS), "has the shape [3, 2]"),
    "another width": (config_of(_ROWS, token_dim=3), weights_of(_ROWS), "has the shape [3, 2]"),
    "one dimension": (config_of(_ROWS), weights_of(_ROWS.reshape(-1)), "has the shape [6]"),
    "another tensor": (config_of(_ROWS), weights_of(_ROWS, "lora_A.weight"), "must have only prompt_embeddings"),
    "double": (config_of(_ROWS), weights_of(_ROWS.astype(np.float64)), "type 'F64'"),
    "a pickle": (config_of(_ROWS), b"\x80\x02}q\x00." + bytes(100), "not a safetensors file"),
    "a long header": (config_of(_ROWS), (1 << 62).to_bytes(8, "little") + bytes(100), "not a safetensors file"),
    "empty": (config_of(_ROWS), b"", "not a safetensors file"),
    "cut short": (config_of(_ROWS), weights_of(_ROWS)[:-4], "its header says (0, 24)"),
    "too large": (config_of(_ROWS), bytes(9 << 20), "are allowed"),
}
"""Configuration, weights, and a part of the expected error message, by name of the case."""
