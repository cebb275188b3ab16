"""The same random weights in transformers' own model."""

from typing import Any

import torch

from bench.gpu.served import SEED, Served
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.models.qwen3 import Qwen3
from engine_worker.runner.weights import random_weights


def blank(path: str, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model of a folder's config.json, with weights of its own making."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with device:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype).eval()


@torch.inference_mode()
def twin(served: Served, device: torch.device) -> Any:
    """A model with the weights of a runner: drawn in the same order from the same seed."""
    model = blank(str(served.checkpoint.path), device, served.dtype)
    raw = served.checkpoint.config
    shape = Qwen3.read_config(raw)
    ours = Qwen3(shape, ReferenceAttention(shape.heads), dtype=served.dtype, device=torch.device("meta"))
    theirs = dict(model.named_parameters())
    targets = {name: theirs[name] for name in ours.targets()}
    random_weights(targets, SEED, float(raw.get("initializer_range", 0.02)), _silent)
    return model


def _silent(done: int, total: int) -> None:
    """It is quick."""
