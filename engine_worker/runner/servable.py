"""Checks that a model can be served with the engine's settings, before any weight is read or downloaded."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine_worker.attention.choice import check_dtype
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.shard import Place, Shard
from engine_worker.models.model import Model
from engine_worker.models.registry import find_model
from engine_worker.runner.config import DTYPES, RunnerConfig, check_output_layers, find_device, find_dtype
from engine_worker.runner.load import check_adapters
from engine_worker.runner.memory import check_memory
from sluice.checkpoint.folder import Checkpoint
from sluice.checkpoint.gguf import SUFFIX
from sluice.checkpoint.servable import check_servable as check_files

META = torch.device("meta")
LEAST_BYTES = 0.5
"""Of a weight that is quantized."""
KV_BYTES = {"u8": 1, **{name: dtype.itemsize for name, dtype in DTYPES.items()}}
"""Bytes of a value in the KV cache, for each `kv_precision` other than auto."""


class PlannedRank(Shard):
    """Rank 0 of a group that has not started yet."""

    def __init__(self, size: int) -> None:
        self.size = size


class Described(NamedTuple):
    """A model whose weights take no memory."""

    model: Model
    weight_bytes: int
    """Of one rank."""
    token_bytes: int
    """Of one token in a rank's KV cache."""


def check_servable(checkpoints: Sequence[Checkpoint], config: RunnerConfig, ranks: int, *, by_openvino: bool) -> None:
    """`checkpoints`: the model and its draft model, if any. Their weights need not exist yet. `by_openvino`: whether a
    setting requires OpenVINO.

    Raises CheckpointError on a model that is not supported, MemoryTooSmallError, and ValueError on settings that do not
    fit the model.
    """
    device = find_device(config)
    models = [_describe(each, config, device, ranks, by_openvino) for each in checkpoints]
    check_output_layers(config.output_layers, models[0].model.config.num_layers)
    check_adapters(config, checkpoints[0])
    check_memory(config, sum(each.weight_bytes for each in models), sum(each.token_bytes for each in models), device)


def _describe(
    checkpoint: Checkpoint, config: RunnerConfig, device: torch.device, ranks: int, by_openvino: bool
) -> Described:
    check_files(checkpoint)
    dtype = find_dtype(config, checkpoint, device)
    if not by_openvino:
        check_dtype(config.attention, device.type, dtype)
    resolved, shard = find_model(checkpoint.config), PlannedRank(ranks)
    hidden_size = checkpoint.config.get("hidden_size")
    if config.quantize == "int4" and isinstance(hidden_size, int) and hidden_size % 2:
        raise ValueError(f"quantize = int4 needs an even hidden_size (that of {checkpoint.name} is {hidden_size})")
    heads = shard.heads(resolved.config.heads)
    # OpenVINO's weights are loaded in float32.
    place = Place(torch.float32 if by_openvino else dtype, META, shard)
    model = resolved.architecture(resolved.config, ReferenceAttention(heads), place)
    kv_bytes = KV_BYTES.get(config.kv_precision, dtype.itemsize)
    token_bytes = 2 * resolved.config.num_layers * heads.num_kv_heads * heads.head_dim * kv_bytes
    weight_bytes = sum(target.nbytes for target in model.targets().values())
    if device.type == "cuda" and (config.quantize != "none" or _may_be_quantized(checkpoint)):
        # How many of them, and in how many bits, is known when they are loaded.
        weight_bytes //= int(dtype.itemsize / LEAST_BYTES)
    return Described(model, weight_bytes, token_bytes)


def _may_be_quantized(checkpoint: Checkpoint) -> bool:
    return checkpoint.quantization is not None or any(file.suffix == SUFFIX for file in checkpoint.path.glob("*"))
