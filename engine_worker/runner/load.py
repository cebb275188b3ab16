"""Builds a runner from a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from engine_worker.attention.backend import AttentionBackend, Site, capability_of
from engine_worker.attention.cache import KVCache
from engine_worker.attention.choice import ChosenBackend, choose
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.layer import Layer
from engine_worker.layers.packing import Packer
from engine_worker.layers.shard import UNSHARDED, Place, Shard
from engine_worker.lora.device import DeviceAdapters
from engine_worker.lora.library import AdapterLibrary
from engine_worker.lora.load import library_plan, make_adapters
from engine_worker.models.config import NotNativeError, narrow_windows
from engine_worker.models.decoder import CausalLM
from engine_worker.models.model import Model, SelfLoading
from engine_worker.models.registry import find_model, model_class
from engine_worker.runner.config import RunnerConfig, find_device, find_dtype
from engine_worker.runner.fusing import by_triton, fuse, missing_compiler, none
from engine_worker.runner.graphs import CaptureError, CudaCapture, Graphs
from engine_worker.runner.memory import count_blocks, count_host_blocks, fraction_of, free_memory
from engine_worker.runner.runner import Followers, ModelRunner
from engine_worker.runner.torch_forward import TorchForward
from engine_worker.runner.warmup import capture_graphs, graphs_refused, warm_up
from engine_worker.runner.weights import Progress, load_weights, random_weights
from engine_worker.sampling.noise import GumbelMax
from sluice.ring.checkpoint import Checkpoint
from sluice.ring.cores import usable_cores

Warn = Callable[[str, str], None]
"""(log event, reason)."""


def _ignore(*_: object) -> None:
    """Progress, or a warning."""


class RankSetup(NamedTuple):
    config: RunnerConfig
    """With `tokens_per_block` set."""
    max_context: int
    dtype: torch.dtype
    device: torch.device
    shard: Shard


def load_runner(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    shard: Shard = UNSHARDED,
    followers: Followers | None = None,
    capturing: Progress = _ignore,
    warn: Warn = _ignore,
) -> ModelRunner:
    """Load the weights, allocate the KV cache, capture CUDA graphs.

    `progress` gets bytes done and bytes in total, `capturing` graphs. `followers`: the other ranks, if any, which load
    at the same time. `warn` reports what makes serving slower than it could be.

    Raises CheckpointError on an unsupported or incomplete model, ValueError on options that contradict each other, and
    MemoryTooSmallError.
    """
    if config.lora and not adaptable(checkpoint):
        raise ValueError("lora = true, but this model runs through transformers, whose layers have no adapters")
    forward, choices, gumbel_max = load(checkpoint, config, progress, shard, capturing, warn)
    overlap = forward.device.type == "cuda" if config.overlap is None else config.overlap
    runner = ModelRunner(forward, overlap, followers, gumbel_max=gumbel_max)
    runner.choices |= choices
    if forward.adapters is not None:
        runner.adapters = AdapterLibrary(config, library_plan(forward.adapters, config, forward.hidden_dtype))
        for folder, reason in runner.adapters.prefetch():
            warn("adapter_left_out", f"{folder}: {reason}")
    return runner


def adaptable(checkpoint: Checkpoint) -> bool:
    """Whether the layers are our own."""
    try:
        model_class(checkpoint.config).read_config(checkpoint.config)
    except NotNativeError:
        return False
    return True


def load_forward(checkpoint: Checkpoint, config: RunnerConfig, progress: Progress, shard: Shard) -> TorchForward:
    """As `load_runner`, for ranks other than 0: the same model, without a runner."""
    return load(checkpoint, config, progress, shard, _ignore, _ignore)[0]


def load(
    checkpoint: Checkpoint, config: RunnerConfig, progress: Progress, shard: Shard, capturing: Progress, warn: Warn
) -> tuple[TorchForward, Mapping[str, str], GumbelMax]:
    """A model, or a rank's shard of it, in memory; how it runs, for the log; its sampling kernel. See `load_runner`."""
    device = find_device(config)
    config = share_of_rank(config, device)
    _use_device(device, config, warn)
    dtype, context = find_dtype(config, checkpoint, device), checkpoint.max_context_tokens
    found = find_model(checkpoint.config)
    shape = replace(found.config, windows=narrow_windows(found.config.windows, config.max_attention_window, context))
    heads = shard.heads(shape.heads)
    with torch.inference_mode():
        site = Site(
            device, capability_of(device), dtype, heads, shape.windows, config.tokens_per_block, config.fused_kernels
        )
        chosen = choose(config.attention, site)
        # One scheduler allocates the blocks of all ranks.
        if chosen.tokens_per_block != shard.all_min(chosen.tokens_per_block):
            raise ValueError(f"ranks disagree on tokens_per_block: {chosen.tokens_per_block} suits this one")
        _warn_if_slow(chosen, device, warn)
        config = replace(config, tokens_per_block=chosen.tokens_per_block)
        setup = RankSetup(config, context, dtype, device, shard)
        model = found.architecture(shape, chosen.backend, Place(dtype, device, shard))
        fill_weights(model, checkpoint, config, progress)
        packer = _pack(model)
        fused = fuse(model, heads, dtype, device, shard, by_triton if config.fused_kernels else none)
        gumbel_max = fused.gumbel_max if shard.rank == 0 else None
        adapters = _make_adapters(model, config, dtype, device, shard)
        cache = _make_cache(model, chosen.backend, setup, gumbel_max)
        graphs, summary = _make_graphs(model, cache, chosen.backend, setup, gumbel_max, capturing, warn)
    choices = {
        **found.choices,
        "attention_reason": chosen.reason,
        "linear": packer.summary,
        "fused": fused.summary,
        "cuda_graphs": summary,
    }
    if adapters is not None:
        choices["lora_pages"] = str(adapters.num_pages)
    return TorchForward(model, cache, chosen.backend, device, graphs, shard, adapters), choices, fused.gumbel_max


def _make_adapters(
    model: Model, config: RunnerConfig, dtype: torch.dtype, device: torch.device, shard: Shard
) -> DeviceAdapters | None:
    """Before the KV cache, which gets a part of what is left."""
    if not config.lora or not isinstance(model, CausalLM):
        return None
    return make_adapters(model.model.layers, config, dtype, device, shard, free_memory(device) // config.ranks_here)


def _use_device(device: torch.device, config: RunnerConfig, warn: Warn) -> None:
    if device.type == "cpu":
        torch.set_num_threads(config.threads or 1)
    else:
        torch.cuda.set_device(device)
        # Before the kernels are tested: each would report it on its own, at length.
        if missing := missing_compiler():
            warn("compiler_not_found", missing)


def _warn_if_slow(chosen: ChosenBackend, device: torch.device, warn: Warn) -> None:
    if device.type == "cuda" and chosen.backend.name == ReferenceAttention.name:
        warn("attention_fell_back", chosen.reason)


def fill_weights(model: Model, checkpoint: Checkpoint, config: RunnerConfig, progress: Progress) -> None:
    """The model can be called afterwards. Raises CheckpointError."""
    if config.weights == "random":
        deviation = float(checkpoint.config.get("initializer_range", 0.02))
        random_weights(model.targets(), config.weights_seed, deviation, progress, model.cuts())
    elif isinstance(model, SelfLoading):
        model.load(checkpoint.path, progress)
    else:
        load_weights(checkpoint.path, model.targets(), progress, model.cuts())
    model.freeze()


def _pack(model: Model) -> Packer:
    packer = Packer()
    # transformers' modules call their own linear layers.
    if isinstance(model, Layer):
        model.pack(packer)
    return packer


def _make_cache(model: Model, backend: AttentionBackend, setup: RankSetup, gumbel_max: GumbelMax | None) -> KVCache:
    config, context, dtype, device, shard = setup
    heads, num_layers = shard.heads(model.config.heads), model.config.num_layers
    sizes = (config.tokens_per_block, heads.num_kv_heads, heads.head_dim)
    if device.type == "cuda":
        # What the largest step allocates must be gone from the free memory before the cache is sized by it.
        tiny = KVCache(num_layers, 1, *sizes, dtype, device)
        warm_up(model, tiny, backend, config, context, gumbel_max=gumbel_max)
    block_bytes = KVCache.block_bytes(num_layers, *sizes, dtype)
    num_blocks = shard.all_min(count_blocks(config, block_bytes, heads.num_kv_heads, context, device))
    num_host_blocks = shard.all_min(count_host_blocks(config, block_bytes, num_blocks, device))
    return KVCache(num_layers, num_blocks, *sizes, dtype, device, num_host_blocks)


def _make_graphs(
    model: Model,
    cache: KVCache,
    backend: AttentionBackend,
    setup: RankSetup,
    gumbel_max: GumbelMax | None,
    capturing: Progress,
    warn: Warn,
) -> tuple[Graphs | None, str]:
    """The graphs, if any, and a summary for the log."""
    config, context, _, device, shard = setup
    refused = graphs_refused(config, model, backend, device)
    # All ranks or none: padding changes the shapes of a step, on which collectives must agree.
    if not shard.all_min(int(refused is None)):
        return None, f"none: {refused or 'another rank cannot'}"
    graphs, summary = None, ""
    try:
        graphs = capture_graphs(model, cache, backend, config, context, CudaCapture(device), capturing, shard)
        summary = f"{len(graphs.sizes)} up to {graphs.sizes[-1]}"
    except CaptureError as error:
        summary = f"none: the capture failed: {error}"
        warn("cuda_graphs_failed", summary)
    where = "beside the KV cache (see kv_memory_fraction) and CUDA graphs"
    warm_up(model, cache, backend, config, context, gumbel_max=gumbel_max, where=where)
    return graphs, summary


def share_of_rank(config: RunnerConfig, device: torch.device) -> RunnerConfig:
    """The config with this rank's share of what all ranks on this machine have together."""
    ranks, fraction = config.ranks_here, config.kv_memory_fraction
    # A GPU belongs to one rank, but ranks on a CPU share its memory.
    if device.type == "cpu" and ranks > 1 and (fraction is not None or config.kv_cache_tokens is None):
        fraction = fraction_of(config, device) / ranks
    return replace(
        config,
        threads=max(1, (config.step_threads or usable_cores() - 1) // ranks),
        kv_memory_fraction=fraction,
        kv_host_memory=config.kv_host_memory // ranks,
    )
