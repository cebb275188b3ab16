"""How one rank runs the model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sluice.ring.checkpoint import Checkpoint, CheckpointError
from sluice.settings.engine import BatchSize, Compute, ImageOptions, KvCacheSize, LoraOptions, OutputLayers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RunnerConfig(OutputLayers, ImageOptions, LoraOptions, BatchSize, KvCacheSize, Compute):
    """The engine's settings that the runner needs, and the rank's place on its machine."""

    device_index: int = 0
    """Which of the GPUs."""
    ranks_here: int = 1
    """Processes on this machine that compute this model together, and share its cores and its memory."""
    weights_seed: int = 0


@dataclass(frozen=True)
class DraftConfig:
    """A second model that drafts for the first one."""

    checkpoint: Checkpoint
    max_batch_size: int
    """Sequences for which it guesses at once."""

    def runner_config(self, config: RunnerConfig, window: int | None) -> RunnerConfig:
        """Of the draft model. `config`: of the model, with `tokens_per_block` set; `window`: its widest one, which
        decides how long blocks are held."""
        batch = min(config.max_batch_size, max(1, self.max_batch_size))
        windows = () if window is None else (window,)
        # Adapters are of the model alone: without them guesses are worse, and the tokens the same.
        return replace(config, max_batch_size=batch, max_attention_window=windows, lora=False, output_layers=())


def check_output_layers(layers: Sequence[int], num_layers: int) -> None:
    """Raises ValueError if the model does not have one of them."""
    for layer in layers:
        if layer >= num_layers:
            raise ValueError(f"output_layers: the model has no layer {layer}, its last is {num_layers - 1}")


def find_device(config: RunnerConfig) -> torch.device:
    """Raises ValueError if the machine does not have it."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cpu" or (config.device == "auto" and not found):
        return torch.device("cpu")
    if not found:
        raise ValueError("device = cuda, but torch finds no CUDA device")
    if config.device_index >= found:
        raise ValueError(f"{config.ranks_here} ranks need a GPU each, but torch finds {found}")
    return torch.device("cuda", config.device_index)


def find_dtype(config: RunnerConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    # transformers 5 writes dtype, older versions torch_dtype.
    name = str(checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype", "bfloat16")))
    if name not in DTYPES:
        raise CheckpointError(f"config.json: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]
