"""What happens between loading and serving on a GPU: compute the largest step, so that the KV cache leaves the memory
that it needs; capture CUDA graphs; compute that step again."""

import gc
from itertools import count

import torch
from msgspec.structs import replace

from engine_worker.attention.backend import AttentionBackend, synchronize
from engine_worker.attention.cache import KVCache
from engine_worker.attention.split import LONG
from engine_worker.layers.shard import UNSHARDED, Shard
from engine_worker.models.config import widest_window
from engine_worker.models.model import Model
from engine_worker.runner.batch import to_device
from engine_worker.runner.buffers import (
    LARGEST,
    Buffers,
    ContextBuffers,
    GenerationBuffers,
    table_width,
)
from engine_worker.runner.compute import StepDraws
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.graphs import Capture, CaptureError, Graph, Graphs, Work
from engine_worker.runner.memory import MemoryTooSmallError, free_memory
from engine_worker.runner.torch_forward import TorchForward
from engine_worker.runner.weights import Progress
from engine_worker.sampling.choose import TORCH, SamplingKernels
from engine_worker.sampling.logit_rules import build_logit_rules
from engine_worker.sampling.sampler import sample
from engine_worker.step import Draw, Slice
from sluice.wire.params import SamplingParams

UNFILTERED = SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, logprobs=20)
FILTERED = replace(UNFILTERED, top_p=0.9)
"""One of these needs the most memory of all sampling options; which one depends on the batch size."""


def largest_step(config: RunnerConfig, max_context: int, sampling: SamplingParams) -> list[Slice]:
    """The maximum number of tokens in the maximum number of sequences, one of which is as long as possible."""
    tokens_left = config.max_tokens_per_step
    (rules,) = build_logit_rules(sampling, [0])
    slices = []
    for sequences_left in reversed(range(min(config.max_batch_size, tokens_left))):
        count = min(max_context, tokens_left - sequences_left)
        # All sequences share block 0, whose content does not matter yet.
        blocks = [0] * -(-count // config.tokens_per_block)
        slices.append(Slice([0] * count, 0, blocks, (Draw(sampling, 0, 0, rules=rules),)))
        tokens_left -= count
    return slices


def warm_up(
    model: Model,
    cache: KVCache,
    backend: AttentionBackend,
    config: RunnerConfig,
    max_context: int,
    *,
    kernels: SamplingKernels | None = TORCH,
    where: str = "after loading",
) -> None:
    """Run the largest step and sample from it, so that torch and libraries allocate the most memory that they will
    need. On CUDA, torch keeps this memory until a graph is captured.

    cache: has at least one block, which is overwritten. kernels: None if this rank does not sample. where: what has
    been allocated before, for the error. Raises MemoryTooSmallError.
    """
    device = cache.layers[0].keys.device
    if device.type == "cuda":
        # Free what the kernel tests have allocated, so that the free memory below is accurate.
        gc.collect()
        torch.cuda.empty_cache()
    free = free_memory(device)
    unfiltered, filtered = (largest_step(config, max_context, sampling) for sampling in (UNFILTERED, FILTERED))
    forward = TorchForward(model, cache, backend, device)
    try:
        logits = forward.logits((), forward.prepare(forward.arrays(unfiltered)))
        if logits is not None and kernels is not None:
            for slices in (unfiltered, filtered):
                plan = to_device(StepDraws.of(slices).plan(model.config.vocab_size), device)
                results = plan.run_rules(logits, None)
                results = results._replace(edits=to_device(results.edits, device))
                sample(logits, plan, results, widen=False, kernels=kernels)
        synchronize(device)
    except torch.OutOfMemoryError as error:
        raise MemoryTooSmallError(
            f"{free >> 20} MiB are free {where}: not enough for a step of max_tokens_per_step = "
            f"{config.max_tokens_per_step} tokens and max_batch_size = {config.max_batch_size} sequences"
        ) from error


def graphs_refused(config: RunnerConfig, model: Model, backend: AttentionBackend, device: torch.device) -> str | None:
    """Why CUDA graphs cannot be used, for the log; None if they can."""
    if device.type != "cuda":
        return "the device is a CPU"
    if not config.cuda_graphs:
        return "cuda_graphs = false"
    if not backend.graphs:
        return f"attention = {backend.name} waits for the device"
    if not model.graphs:
        return "the model waits for the device"
    return None


def capture_graphs(
    model: Model,
    cache: KVCache,
    backend: AttentionBackend,
    config: RunnerConfig,
    max_context: int,
    capture: Capture,
    progress: Progress,
    shard: Shard = UNSHARDED,
) -> tuple[Graphs, ...]:
    """Graphs for generation steps of up to `max_batch_size` sequences with up to `max_context` tokens and, if attention
    can be captured in them, for steps with context of up to LARGEST tokens.

    Each capture makes torch return cached memory to CUDA, which undoes `warm_up`. `progress` is called with graphs done
    and graphs in total. Raises MemoryTooSmallError, and CaptureError on all ranks alike.
    """
    size, device = cache.tokens_per_block, cache.layers[0].keys.device
    longest = min(max_context, cache.num_blocks * size)
    blocks = table_width(longest, widest_window(model.config.windows), size)
    rows = config.max_batch_size
    # A graph repeats the launches of its longest context, so short contexts have separate graphs.
    widths = sorted({min(blocks, -(-LONG // size)), blocks})
    kinds: list[Buffers] = [GenerationBuffers(min(rows, LARGEST), width, size, device) for width in widths]
    if backend.context_graphs:
        # With a window, the block table of a step with context also has the blocks of the step's tokens.
        context_blocks = min(-(-longest // size), blocks + -(-LARGEST // size))
        kinds.append(ContextBuffers(config.max_tokens_per_step, rows, context_blocks, size, device))
    captured = _counting(_agreed(capture, shard), progress, sum(len(buffers.sizes) for buffers in kinds))
    free = free_memory(device)
    try:
        return tuple(
            Graphs(
                lambda token_ids, positions, inputs: model(token_ids, positions, cache, inputs),
                lambda inputs: backend.prepare(inputs, cache),
                buffers,
                captured,
            )
            for buffers in kinds
        )
    except torch.OutOfMemoryError as error:
        raise MemoryTooSmallError(
            f"{free >> 20} MiB are free in addition to the KV cache: not enough for CUDA graphs of "
            f"{min(rows, LARGEST)} sequences; lower kv_memory_fraction or max_batch_size, or set cuda_graphs = false"
        ) from error


def _counting(capture: Capture, progress: Progress, total: int) -> Capture:
    done = count(1)
    progress(0, total)

    def counted(work: Work) -> Graph:
        graph = capture(work)
        progress(next(done), total)
        return graph

    return counted


def _agreed(capture: Capture, shard: Shard) -> Capture:
    """If one rank fails to capture a graph, all ranks fail there: in the next graph they would wait for it forever."""

    def attempt(work: Work) -> Graph:
        graph, failure = None, CaptureError("another rank failed")
        try:
            graph = capture(work)
        except CaptureError as error:
            failure = error
        all_captured = shard.all_min(int(graph is not None))
        if graph is None or not all_captured:
            raise failure
        return graph

    return attempt
