"""From a checkpoint to a runner."""

from dataclasses import replace

import torch

from engine_worker.attention.backend import AttentionBackend
from engine_worker.attention.cache import KVCache
from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.models.model import ModelConfig, SelfLoading
from engine_worker.models.registry import find_model
from engine_worker.models.windows import narrowed
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.machine import usable_cores
from engine_worker.runner.memory import count_blocks, count_host_blocks
from engine_worker.runner.runner import ModelRunner
from engine_worker.runner.weights import Progress, load_weights, random_weights
from engine_worker.step import Runner
from sluice.ring.checkpoint import Checkpoint, CheckpointError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_runner(checkpoint: Checkpoint, config: RunnerConfig, progress: Progress) -> Runner:
    """Load the weights, then give the KV cache its memory. `progress` is called with bytes done and bytes in all.

    Raises CheckpointError on a model that is not supported or not whole, ValueError on options that do not fit
    together, and MemoryTooSmallError.
    """
    device = _device(config)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or max(1, usable_cores() - 1))
    dtype = _dtype(config, checkpoint, device)
    found = find_model(checkpoint.config)
    context = checkpoint.max_context_tokens
    shape = replace(found.config, windows=narrowed(found.config.windows, config.max_attention_window, context))
    backend = _backend(config, shape, device)
    with torch.inference_mode():
        model = found.architecture(shape, backend, dtype=dtype, device=device)
        if config.weights == "random":
            deviation = float(checkpoint.config.get("initializer_range", 0.02))
            random_weights(model.targets(), config.weights_seed, deviation, progress)
        elif isinstance(model, SelfLoading):
            model.load(checkpoint.path, progress)
        else:
            load_weights(checkpoint.path, model.targets(), progress)
        model.freeze()
        sizes = (config.tokens_per_block, shape.heads.num_kv_heads, shape.heads.head_dim)
        block_bytes = KVCache.block_bytes(shape.num_layers, *sizes, dtype)
        num_blocks = count_blocks(config, block_bytes, shape.heads.num_kv_heads, context, device)
        num_host_blocks = count_host_blocks(config, block_bytes, num_blocks, device)
        cache = KVCache(shape.num_layers, num_blocks, *sizes, dtype, device, num_host_blocks)
    overlap = device.type == "cuda" if config.overlap is None else config.overlap
    runner = ModelRunner(model, cache, backend, device, overlap)
    runner.choices |= found.choices
    return runner


def _device(config: RunnerConfig) -> torch.device:
    found = torch.cuda.is_available()
    if config.device == "cuda" and not found:
        raise ValueError("device = cuda, but torch finds no CUDA device")
    return torch.device("cuda" if config.device == "cuda" or (config.device == "auto" and found) else "cpu")


def _dtype(config: RunnerConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    name = str(checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype", "bfloat16")))
    if name not in DTYPES:
        raise CheckpointError(f"config.json: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def _backend(config: RunnerConfig, shape: ModelConfig, device: torch.device) -> AttentionBackend:
    if config.attention == "cpu" and device.type != "cpu":
        raise ValueError(f"attention = cpu does not run on device {device.type}")
    if config.attention == "reference" or device.type != "cpu":
        return ReferenceAttention(shape.heads)
    return CpuAttention(shape.heads, shape.windows)
