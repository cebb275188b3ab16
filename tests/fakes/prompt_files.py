"""What peft saves of a tuned prompt, without peft."""

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
