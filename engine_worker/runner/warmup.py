"""What comes between loading and serving on a GPU: a step of the largest size, so that what it takes is taken before
the KV cache gets the rest, graphs of the steps that will come most, and that step again."""

import gc

import torch
from msgspec.structs import replace

from engine_worker.attention.backend import AttentionBackend
from engine_worker.attention.cache import KVCache
from engine_worker.attention.refusal import synchronize
from engine_worker.layers.shard import ALONE, Shard
from engine_worker.models.model import Model
from engine_worker.models.windows import widest
from engine_worker.runner.batch import build
from engine_worker.runner.buffers import Buffers, table_width
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.forward import Forward
from engine_worker.runner.graphs import LARGEST, Capture, CaptureError, Graph, Graphs, Work
from engine_worker.runner.machine import free_memory
from engine_worker.runner.memory import MemoryTooSmallError
from engine_worker.runner.transfer import send
from engine_worker.runner.weights import Progress
from engine_worker.sampling.gumbel_max import Race, by_torch
from engine_worker.sampling.sampler import sample
from engine_worker.step import Draw, Slice
from sluice.ring.params import SamplingParams

UNFILTERED = SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, logprobs=20)
FILTERED = replace(UNFILTERED, top_p=0.9)
"""One of them takes most memory of all that a draw may ask for: which, hangs on how many there are."""


def largest_step(config: RunnerConfig, max_context: int, sampling: SamplingParams) -> list[Slice]:
    """As many tokens as a step may have, of as many sequences, one of them as long as can be. All blocks are block 0:
    nobody will read what is written there."""
    left = config.max_tokens_per_step
    slices = []
    for others in reversed(range(min(config.max_batch_size, left))):
        count = min(max_context, left - others)
        blocks = [0] * -(-count // config.tokens_per_block)
        slices.append(Slice([0] * count, 0, blocks, (Draw(sampling, 0, 0, [0], [0]),)))
        left -= count
    return slices


def warm_up(
    model: Model,
    cache: KVCache,
    backend: AttentionBackend,
    config: RunnerConfig,
    max_context: int,
    *,
    race: Race | None = by_torch,
    where: str = "after loading",
) -> None:
    """Run the largest step, and sample by the `race`; None: this rank does not sample. On CUDA torch keeps what memory
    it took until a graph is captured; so do libraries.

    cache: of one block or more; the first is written to. `where`: what has its memory by then, for the error. Raises
    MemoryTooSmallError.
    """
    device = cache.layers[0].keys.device
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    free, window = free_memory(device), widest(model.config.windows)
    unfiltered, filtered = (
        build(largest_step(config, max_context, sampling), config.tokens_per_block, window)
        for sampling in (UNFILTERED, FILTERED)
    )
    forward = Forward(model, cache, backend, device)
    try:
        logits = forward.logits((), forward.prepare(unfiltered.arrays))
        if logits is not None and race is not None:
            for batch in (unfiltered, filtered):
                sample(logits, send(batch.plan(model.config.vocab_size), device), widen=False, race=race)
        synchronize(device)
    except torch.OutOfMemoryError as error:
        raise MemoryTooSmallError(
            f"{free >> 20} MiB are free {where}: too little for a step of max_tokens_per_step = "
            f"{config.max_tokens_per_step} tokens and max_batch_size = {config.max_batch_size} sequences"
        ) from error


def graphs_refused(config: RunnerConfig, model: Model, backend: AttentionBackend, device: torch.device) -> str | None:
    """Why there are no CUDA graphs, for the log; None: nothing speaks against them."""
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
    shard: Shard = ALONE,
) -> Graphs:
    """Of generation steps of up to `max_batch_size` sequences with up to `max_context` tokens. `progress` is called
    with graphs done and graphs in all. Raises MemoryTooSmallError, and on all ranks alike CaptureError.

    CUDA gets back whatever torch keeps besides: see `warm_up`.
    """
    size, device = cache.tokens_per_block, cache.layers[0].keys.device
    longest = min(max_context, cache.num_blocks * size)
    buffers = Buffers(
        min(config.max_batch_size, LARGEST), table_width(longest, widest(model.config.windows), size), size, device
    )
    free = free_memory(device)
    try:
        return Graphs(
            lambda token_ids, positions, inputs: model(token_ids, positions, cache, inputs),
            lambda inputs: backend.prepare(inputs, cache),
            buffers,
            _agreed(capture, shard),
            progress,
        )
    except torch.OutOfMemoryError as error:
        raise MemoryTooSmallError(
            f"{free >> 20} MiB are left beside the KV cache: too little for CUDA graphs of {buffers.rows} sequences; "
            "lower kv_memory_fraction or max_batch_size, or set cuda_graphs = false"
        ) from error


def _agreed(capture: Capture, shard: Shard) -> Capture:
    """Where one rank cannot capture a graph, no rank goes on to the next: it would wait for that one there."""

    def attempt(work: Work) -> Graph:
        graph, cause = None, CaptureError("another rank failed")
        try:
            graph = capture(work)
        except CaptureError as error:
            cause = error
        together = shard.least(int(graph is not None))
        if graph is None or not together:
            raise cause
        return graph

    return attempt
