"""From a checkpoint to a runner."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from engine_worker.attention.backend import AttentionBackend
from engine_worker.attention.cache import KVCache
from engine_worker.attention.choice import Choice, Site, choose
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.layer import Layer
from engine_worker.layers.packing import Packer
from engine_worker.layers.shard import ALONE, Shard
from engine_worker.models.model import Model, SelfLoading
from engine_worker.models.registry import find_model
from engine_worker.models.windows import narrowed
from engine_worker.runner import compiler
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.forward import Forward
from engine_worker.runner.fusing import by_triton, fuse, none
from engine_worker.runner.graphs import CaptureError, CudaCapture, Graphs
from engine_worker.runner.memory import count_blocks, count_host_blocks, fraction_of
from engine_worker.runner.runner import ModelRunner, Ranks
from engine_worker.runner.warmup import capture_graphs, graphs_refused, warm_up
from engine_worker.runner.weights import Progress, load_weights, random_weights
from engine_worker.sampling.gumbel_max import Race
from sluice.ring.checkpoint import Checkpoint, CheckpointError
from sluice.ring.cores import usable_cores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


Warn = Callable[[str, str], None]
"""Gets what an operator should know, as an event for the log, and the reason."""


def _unseen(_done: int, _total: int) -> None:
    pass


def _unheard(_event: str, _because: str) -> None:
    pass


class Loaded(NamedTuple):
    """A model, or a rank's shard of it, in memory."""

    forward: Forward
    choices: Mapping[str, str]
    """For the log."""
    race: Race
    """For sampling."""


def load_runner(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    shard: Shard = ALONE,
    ranks: Ranks | None = None,
    capturing: Progress = _unseen,
    warn: Warn = _unheard,
) -> ModelRunner:
    """Load the weights, then give the KV cache its memory, then capture graphs. `progress` is called with bytes done
    and bytes in all, `capturing` with graphs. `ranks`: the others, if there are others; they load at the same time.
    `warn` is told why things are slower than they could be.

    Raises CheckpointError on a model that is not supported or not whole, ValueError on options that do not fit
    together, and MemoryTooSmallError.
    """
    forward, choices, race = load(checkpoint, config, progress, shard, capturing, warn)
    overlap = forward.device.type == "cuda" if config.overlap is None else config.overlap
    runner = ModelRunner(forward, overlap, ranks, race=race)
    runner.choices |= choices
    return runner


def load_forward(checkpoint: Checkpoint, config: RunnerConfig, progress: Progress, shard: Shard) -> Forward:
    """What another rank than 0 computes with: the same. See `load_runner`."""
    return load(checkpoint, config, progress, shard, _unseen, _unheard).forward


def load(
    checkpoint: Checkpoint, config: RunnerConfig, progress: Progress, shard: Shard, capturing: Progress, warn: Warn
) -> Loaded:
    """See `load_runner`."""
    device = find_device(config)
    config = _own(config, device)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or 1)
    else:
        torch.cuda.set_device(device)
        _check_compiler(warn)
    dtype = _dtype(config, checkpoint, device)
    found = find_model(checkpoint.config)
    context = checkpoint.max_context_tokens
    shape = replace(found.config, windows=narrowed(found.config.windows, config.max_attention_window, context))
    heads = shard.heads(shape.heads)
    with torch.inference_mode():
        site = Site.of(device, dtype, heads, shape.windows, config.tokens_per_block, config.fused_kernels)
        chosen = choose(config.attention, site)
        if chosen.tokens_per_block != shard.least(chosen.tokens_per_block):
            raise ValueError(f"ranks disagree on tokens_per_block: {chosen.tokens_per_block} suits this one")
        _heed(chosen, device, warn)
        config = replace(config, tokens_per_block=chosen.tokens_per_block)
        model = found.architecture(shape, chosen.backend, dtype=dtype, device=device, shard=shard)
        if config.weights == "random":
            deviation = float(checkpoint.config.get("initializer_range", 0.02))
            random_weights(model.targets(), config.weights_seed, deviation, progress, model.cuts())
        elif isinstance(model, SelfLoading):
            model.load(checkpoint.path, progress)
        else:
            load_weights(checkpoint.path, model.targets(), progress, model.cuts())
        model.freeze()
        packer = Packer()
        if isinstance(model, Layer):
            model.pack(packer)
        fused = fuse(model, heads, dtype, device, shard, by_triton if config.fused_kernels else none)
        race = fused.race if shard.rank == 0 else None
        cache = _make_cache(model, chosen.backend, config, context, dtype, device, shard, race)
        graphs, told = _make_graphs(model, cache, chosen.backend, config, context, device, shard, race, capturing, warn)
    choices = {
        **found.choices,
        "attention_because": chosen.because,
        "linear": packer.summary,
        "fused": fused.said,
        "cuda_graphs": told,
    }
    return Loaded(Forward(model, cache, chosen.backend, device, graphs, shard), choices, fused.race)


def _check_compiler(warn: Warn) -> None:
    """Before the trials, whose own errors for it are long and come once per kernel."""
    if absent := compiler.missing():
        warn("no_compiler", absent)


def _heed(chosen: Choice, device: torch.device, warn: Warn) -> None:
    if device.type == "cuda" and chosen.backend.name == ReferenceAttention.name:
        warn("slow_attention", chosen.because)


def _make_graphs(
    model: Model,
    cache: KVCache,
    backend: AttentionBackend,
    config: RunnerConfig,
    max_context: int,
    device: torch.device,
    shard: Shard,
    race: Race | None,
    capturing: Progress,
    warn: Warn,
) -> tuple[Graphs | None, str]:
    """And what to say of them."""
    refused = graphs_refused(config, model, backend, device)
    # Padding makes another step of it: all ranks do it, or none.
    if not shard.least(int(refused is None)):
        return None, f"none: {refused or 'another rank cannot'}"
    graphs, told = None, ""
    try:
        graphs = capture_graphs(model, cache, backend, config, max_context, CudaCapture(device), capturing, shard)
        told = f"{len(graphs.sizes)} up to {graphs.sizes[-1]}"
    except CaptureError as error:
        told = f"none: the capture failed: {error}"
        warn("no_cuda_graphs", told)
    where = "beside the KV cache (see kv_memory_fraction) and CUDA graphs"
    warm_up(model, cache, backend, config, max_context, race=race, where=where)
    return graphs, told


def _make_cache(
    model: Model,
    backend: AttentionBackend,
    config: RunnerConfig,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    race: Race | None,
) -> KVCache:
    heads, num_layers = shard.heads(model.config.heads), model.config.num_layers
    sizes = (config.tokens_per_block, heads.num_kv_heads, heads.head_dim)
    if device.type == "cuda":
        tiny = KVCache(num_layers, 1, *sizes, dtype, device)
        warm_up(model, tiny, backend, config, max_context, race=race)
    block_bytes = KVCache.block_bytes(num_layers, *sizes, dtype)
    num_blocks = shard.least(count_blocks(config, block_bytes, heads.num_kv_heads, max_context, device))
    num_host_blocks = shard.least(count_host_blocks(config, block_bytes, num_blocks, device))
    return KVCache(num_layers, num_blocks, *sizes, dtype, device, num_host_blocks)


def find_device(config: RunnerConfig) -> torch.device:
    """Raises ValueError where there is none."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cpu" or (config.device == "auto" and not found):
        return torch.device("cpu")
    if not found:
        raise ValueError("device = cuda, but torch finds no CUDA device")
    if config.device_index >= found:
        raise ValueError(f"{config.ranks_here} ranks need a GPU each, but torch finds {found}")
    return torch.device("cuda", config.device_index)


def _own(config: RunnerConfig, device: torch.device) -> RunnerConfig:
    """With this rank's share of what those on this machine have together."""
    ranks, fraction = config.ranks_here, config.kv_memory_fraction
    if device.type == "cpu" and ranks > 1 and (fraction is not None or config.kv_cache_tokens is None):
        fraction = fraction_of(config, device) / ranks
    return replace(
        config,
        threads=max(1, (config.step_threads or usable_cores() - 1) // ranks),
        kv_memory_fraction=fraction,
        kv_host_memory=config.kv_host_memory // ranks,
    )


def _dtype(config: RunnerConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    name = str(checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype", "bfloat16")))
    if name not in DTYPES:
        raise CheckpointError(f"config.json: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]
