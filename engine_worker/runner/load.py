"""Builds a runner from a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from engine_worker.attention.backend import AttentionBackend, Site, capability_of
from engine_worker.attention.cache import KVCache, host_layout, layout
from engine_worker.attention.choice import ChosenBackend, choose
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.adapters import find_targets
from engine_worker.layers.layer import Layer
from engine_worker.layers.packing import Packer
from engine_worker.layers.shard import UNSHARDED, DeferredPlace, Place, Shard
from engine_worker.lora.device import DeviceAdapters, make_adapters
from engine_worker.lora.library import make_library
from engine_worker.models.config import NotNativeError, narrow_windows, widest_window
from engine_worker.models.decoder import CausalLM
from engine_worker.models.model import Model
from engine_worker.models.registry import find_model, model_class
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.runner.coded_weights import find_kernels, hold_weights
from engine_worker.runner.config import DraftConfig, RunnerConfig, check_output_layers, find_device, find_dtype
from engine_worker.runner.extensions import NO_EXTENSIONS, Extensions
from engine_worker.runner.followers import Followers
from engine_worker.runner.fusing import fuse, missing_compiler, no_kernels, triton_kernels
from engine_worker.runner.graphs import CaptureError, CudaCapture, Graphs
from engine_worker.runner.memory import count_blocks, fraction_of, free_memory, size_pools
from engine_worker.runner.runner import DraftRunner, ModelRunner
from engine_worker.runner.torch_forward import TorchForward
from engine_worker.runner.vision import load_images
from engine_worker.runner.warmup import capture_graphs, graphs_refused, warm_up
from engine_worker.runner.weights import Progress, fill_weights, ignore_progress
from engine_worker.sampling.choose import SamplingKernels
from engine_worker.sampling.processors import Warn, ignore_warning
from sluice.checkpoint.folder import Checkpoint
from sluice.host.cores import usable_cores


class LoadedModel(NamedTuple):
    """A model, or a rank's shard of it, without its KV cache."""

    model: Model
    backend: AttentionBackend
    config: RunnerConfig
    """With `tokens_per_block` set."""
    max_context: int
    place: Place
    kernels: SamplingKernels
    choices: Mapping[str, str]
    """What was chosen, such as the attention backend, for the log."""
    adapters: DeviceAdapters | None
    """None: it serves no LoRA adapters."""

    @property
    def num_kv_heads(self) -> int:
        return self.place.shard.heads(self.model.config.heads).num_kv_heads

    @property
    def block_bytes(self) -> int:
        return KVCache.block_bytes(self.model.config.num_layers, *self._block_sizes, self.place.dtype)

    @property
    def layout(self) -> Layout:
        kind = host_layout if file_is_on_host(self.place.device) else layout
        return kind(self.model.config.num_layers, *self._block_sizes, self.place.dtype)

    def new_cache(self, num_blocks: int, num_host_blocks: int = 0, file: PoolFile | None = None) -> KVCache:
        num_layers, place = self.model.config.num_layers, self.place
        return KVCache(num_layers, num_blocks, *self._block_sizes, place.dtype, place.device, num_host_blocks, file)

    def warm_up(self, cache: KVCache, where: str = "after loading") -> None:
        kernels = self.kernels if self.place.shard.rank == 0 else None
        warm_up(self.model, cache, self.backend, self.config, self.max_context, kernels=kernels, where=where)

    @property
    def _block_sizes(self) -> tuple[int, int, int]:
        return self.config.tokens_per_block, self.num_kv_heads, self.model.config.heads.head_dim


class Loaded(NamedTuple):
    forward: TorchForward
    choices: Mapping[str, str]
    kernels: SamplingKernels


def load_runner(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    shard: Shard = UNSHARDED,
    followers: Followers | None = None,
    capturing: Progress = ignore_progress,
    warn: Warn = ignore_warning,
    draft: DraftConfig | None = None,
    extensions: Extensions = NO_EXTENSIONS,
) -> ModelRunner:
    """Load the weights, allocate the KV cache and capture CUDA graphs, for the model and the draft model.

    `progress` is called with bytes done and bytes in total, `capturing` with graphs. `followers`: the other ranks, if
    any, which load at the same time. `warn` reports what makes serving slower or worse than it could be. `extensions`:
    without adapters and images, which are loaded here.

    Raises CheckpointError on an unsupported or incomplete model, ValueError on options that contradict each other, and
    MemoryTooSmallError.
    """
    check_adapters(config, checkpoint)
    device = find_device(config)
    images = load_images(checkpoint, config, find_dtype(config, checkpoint, device), device)
    loaded, file = load(checkpoint, config, progress, shard, capturing, warn, draft, extensions.pool_folder)
    forward, choices, kernels = loaded[0]
    drafter = None
    if draft is not None:
        draft_runner = ModelRunner(
            loaded[1].forward, kernels=loaded[1].kernels, extensions=Extensions(guides=extensions.guides)
        )
        drafter = DraftRunner(draft_runner, draft.checkpoint.max_context_tokens)
    adapters = make_library(forward.adapters, config, forward.hidden_dtype, warn)
    overlap = device.type == "cuda" if config.overlap is None else config.overlap
    extensions = replace(extensions, adapters=adapters, images=images, pool_file=file)
    runner = ModelRunner(forward, overlap, followers, kernels, drafter, extensions)
    runner.choices |= choices
    if forward.adapters is not None:
        runner.choices["lora_pages"] = str(forward.adapters.num_pages)
    if images is not None:
        runner.choices["image_tokens"] = str(images.per_image)
    return runner


def check_adapters(config: RunnerConfig, checkpoint: Checkpoint) -> None:
    """Raises ValueError if the settings ask for adapters that the model does not support."""
    if config.lora and not supports_adapters(checkpoint):
        raise ValueError("lora = true, but this model runs through transformers, whose layers do not support adapters")


def supports_adapters(checkpoint: Checkpoint) -> bool:
    """Whether the model is one of Sluice's own, whose layers support LoRA adapters."""
    try:
        model_class(checkpoint.config).read_config(checkpoint.config)
    except NotNativeError:
        return False
    return True


def load_forward(checkpoint: Checkpoint, config: RunnerConfig, progress: Progress, shard: Shard) -> TorchForward:
    """Like `load_runner`, for ranks other than 0, which need no runner."""
    loaded, _ = load(checkpoint, config, progress, shard, ignore_progress, ignore_warning)
    return loaded[0].forward


def load(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    shard: Shard,
    capturing: Progress,
    warn: Warn,
    draft: DraftConfig | None = None,
    folder: PoolFolder | None = None,
) -> tuple[list[Loaded], PoolFile | None]:
    """Load a model, or a rank's shard of it, then the draft model; see `load_runner`. Also returns the file with the
    model's KV cache."""
    device = find_device(config)
    folder = usable_folder(config, device, folder)
    config = share_of_rank(config, device)
    _use_device(device, config, warn)
    with torch.inference_mode():
        models = [_load_model(checkpoint, config, device, progress, shard, warn)]
        if draft is not None:
            draft_config = draft.runner_config(models[0].config, widest_window(models[0].model.config.windows))
            models.append(_load_model(draft.checkpoint, draft_config, device, progress, shard, warn))
        caches, file = _make_caches(models, folder)
        return [_complete(model, cache, capturing, warn) for model, cache in zip(models, caches, strict=True)], file


def file_is_on_host(device: torch.device) -> bool:
    """Whether the pool that can be a file is the host pool: other processes cannot read a GPU's memory."""
    return device.type == "cuda"


def usable_folder(config: RunnerConfig, device: torch.device, folder: PoolFolder | None) -> PoolFolder | None:
    """None if there is no pool that could be a file. Raises ValueError if the user has asked for one."""
    if folder is None or not file_is_on_host(device) or config.kv_host_memory:
        return folder
    if config.needs_pool_folder:
        raise ValueError("kv_folder: on a GPU the file has the blocks in host memory: set kv_host_memory, too (got 0)")
    return None


def _load_model(
    checkpoint: Checkpoint, config: RunnerConfig, device: torch.device, progress: Progress, shard: Shard, warn: Warn
) -> LoadedModel:
    dtype, context = find_dtype(config, checkpoint, device), checkpoint.max_context_tokens
    implementation = find_model(checkpoint.config)
    windows = narrow_windows(implementation.config.windows, config.max_attention_window, context)
    shape = replace(implementation.config, windows=windows)
    heads = shard.heads(shape.heads)
    site = Site(
        device, capability_of(device), dtype, heads, shape.windows, config.tokens_per_block, config.fused_kernels
    )
    chosen = choose(config.attention, site)
    # One scheduler allocates the blocks of all ranks.
    if chosen.tokens_per_block != shard.all_min(chosen.tokens_per_block):
        raise ValueError(
            f"ranks disagree on tokens_per_block: this one would use {chosen.tokens_per_block}; set tokens_per_block"
        )
    _warn_if_slow(chosen, device, warn)
    config = replace(config, tokens_per_block=chosen.tokens_per_block)
    check_output_layers(config.output_layers, shape.num_layers)
    place = Place(dtype, device, shard)
    coded = find_kernels(checkpoint, config, device)
    weights_place = place if coded.kernels is None else DeferredPlace(*place)
    model = implementation.architecture(shape, chosen.backend, weights_place)
    if config.output_layers and not model.has_taps:
        raise ValueError("output_layers: this model runs through transformers, which does not expose single layers")
    if config.quantize != "none" and not isinstance(model, CausalLM):
        raise ValueError("quantize: this model runs through transformers, whose matrices are not quantized")
    matrices = coded.reason
    if coded.kernels is not None and isinstance(model, CausalLM):
        matrices = hold_weights(model, checkpoint, config, place, coded.kernels, progress, warn)
    else:
        fill_weights(model, checkpoint, config, progress)
    packer = _pack(model)
    fused = fuse(model, heads, dtype, device, shard, triton_kernels if config.fused_kernels else no_kernels)
    choices = {
        **implementation.choices,
        "attention_reason": chosen.reason,
        "linear": packer.summary,
        "fused": fused.summary,
    }
    if matrices:
        choices["matrices"] = matrices
    adapters = _make_adapters(model, config, place)
    return LoadedModel(model, chosen.backend, config, context, place, fused.sampling, choices, adapters)


def _make_adapters(model: Model, config: RunnerConfig, place: Place) -> DeviceAdapters | None:
    """Called before the KV cache is allocated, which gets a fraction of the memory that remains."""
    if not config.lora or not isinstance(model, CausalLM):
        return None
    targets = find_targets(model.model.layers)
    return make_adapters(targets, config, *place, free_memory(place.device) // config.ranks_here)


def _use_device(device: torch.device, config: RunnerConfig, warn: Warn) -> None:
    if device.type == "cpu":
        torch.set_num_threads(config.threads or 1)
    else:
        torch.cuda.set_device(device)
        # Reported before the kernels are tested, each of which would report it separately, at length.
        if missing := missing_compiler():
            warn("compiler_not_found", missing)


def _warn_if_slow(chosen: ChosenBackend, device: torch.device, warn: Warn) -> None:
    if device.type == "cuda" and chosen.backend.name == ReferenceAttention.name:
        warn("attention_fell_back", chosen.reason)


def _pack(model: Model) -> Packer:
    packer = Packer()
    # Models of transformers do not use Sluice's linear layers.
    if isinstance(model, Layer):
        model.pack(packer)
    return packer


def _make_caches(models: Sequence[LoadedModel], folder: PoolFolder | None) -> tuple[list[KVCache], PoolFile | None]:
    """A KV cache per model, all with the same number of blocks, and the file with the first one's."""
    config, context, (_, device, shard) = models[0].config, models[0].max_context, models[0].place
    if device.type == "cuda":
        # Allocate what the largest step needs first, so that the cache is sized by the memory that remains.
        for model in models:
            model.warm_up(model.new_cache(1))
    block_bytes = sum(model.block_bytes for model in models)
    num_kv_heads = max(model.num_kv_heads for model in models)
    size = size_pools(
        config,
        block_bytes,
        lambda: shard.all_min(count_blocks(config, block_bytes, num_kv_heads, context, device)),
        device,
        None if folder is None else partial(folder.open, models[0].layout),
        on_host=file_is_on_host(device),
    )
    num_host_blocks = shard.all_min(size.num_host_blocks)
    files = [size.file, *[None for _ in models[1:]]]
    caches = [
        model.new_cache(size.num_blocks, num_host_blocks, file) for model, file in zip(models, files, strict=True)
    ]
    return caches, size.file


def _complete(loaded: LoadedModel, cache: KVCache, capturing: Progress, warn: Warn) -> Loaded:
    graphs, summary = _make_graphs(loaded, cache, capturing, warn)
    device, shard, config = loaded.place.device, loaded.place.shard, loaded.config
    forward = TorchForward(
        loaded.model,
        cache,
        loaded.backend,
        device,
        graphs,
        shard,
        loaded.adapters,
        config.output_layers,
        config.quantize,
    )
    return Loaded(forward, {**loaded.choices, "cuda_graphs": summary}, loaded.kernels)


def _make_graphs(
    loaded: LoadedModel, cache: KVCache, capturing: Progress, warn: Warn
) -> tuple[tuple[Graphs, ...], str]:
    """CUDA graphs, if they are supported, and a summary for the log."""
    model, backend, config, context, (_, device, shard), *_ = loaded
    refused = graphs_refused(config, model, backend, device)
    # All ranks or none: padding changes the shapes of a step, on which collectives must agree.
    if not shard.all_min(int(refused is None)):
        return (), f"none: {refused or 'another rank cannot'}"
    graphs: tuple[Graphs, ...] = ()
    try:
        graphs = capture_graphs(model, cache, backend, config, context, CudaCapture(device), capturing, shard)
        summary = _summary(graphs)
    except CaptureError as error:
        summary = f"none: the capture failed: {error}"
        warn("cuda_graphs_failed", summary)
    loaded.warm_up(cache, "in addition to the KV cache (see kv_memory_fraction) and CUDA graphs")
    return graphs, summary


def _summary(graphs: Sequence[Graphs]) -> str:
    """Number of sizes and largest size of each kind. Graphs of one kind, for short and long contexts, have the same."""
    sizes_of = {graph.kind: f"{len(graph.sizes)} up to {graph.sizes[-1]}" for graph in graphs}
    return " and ".join(f"{sizes}{kind and f' {kind}'}" for kind, sizes in sizes_of.items())


def share_of_rank(config: RunnerConfig, device: torch.device) -> RunnerConfig:
    """The config with this rank's share of the cores and the memory that all ranks on this machine use together."""
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
