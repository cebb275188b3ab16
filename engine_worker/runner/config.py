"""Configuration of one rank's runner."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import Checkpoint
from sluice.settings.engine import BatchSize, Compute, ImageOptions, KvCacheSize, LoraOptions, OutputLayers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RunnerConfig(OutputLayers, ImageOptions, LoraOptions, BatchSize, KvCacheSize, Compute):
    """The engine settings that the runner needs, and the rank's share of its machine."""

    device_index: int = 0
    """Index of the rank's GPU."""
    ranks_here: int = 1
    """Ranks of this engine on this machine, which share its cores and memory."""
    weights_seed: int = 0


@dataclass(frozen=True)
class DraftConfig:
    """The draft model of speculative decoding."""

    checkpoint: Checkpoint
    max_batch_size: int
    """Maximum number of sequences for which it drafts in one step."""

    def runner_config(self, config: RunnerConfig, window: int | None) -> RunnerConfig:
        """The draft model's configuration. `config`: the target model's, with `tokens_per_block` set. `window`: the
        target model's widest one, which decides how long blocks are held."""
        batch = min(config.max_batch_size, max(1, self.max_batch_size))
        windows = () if window is None else (window,)
        # Only the target model gets adapters: without them drafts are accepted less often, but the output is the same.
        return replace(config, max_batch_size=batch, max_attention_window=windows, lora=False, output_layers=())


def check_output_layers(layers: Sequence[int], num_layers: int) -> None:
    """Raises ValueError if the model lacks one of the layers."""
    for layer in layers:
        if layer >= num_layers:
            raise ValueError(f"output_layers: the model has no layer {layer}; its last layer is {num_layers - 1}")


def find_device(config: RunnerConfig) -> torch.device:
    """Raises ValueError if the machine lacks the device."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cpu" or (config.device == "auto" and not num_gpus):
        return torch.device("cpu")
    if not num_gpus:
        raise ValueError("device = cuda, but torch finds no CUDA device")
    if config.device_index >= num_gpus:
        raise ValueError(f"{config.ranks_here} ranks need a GPU each, but torch finds {num_gpus}")
    return torch.device("cuda", config.device_index)


def use_device(device: torch.device) -> None:
    """Make the device current in this thread; every thread that uses CUDA has to call it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


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
