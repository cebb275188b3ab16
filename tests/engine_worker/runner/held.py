"""Models whose quantized matrices are held as stored, models in which they are decoded, and their logits."""

import torch

from engine_worker.attention.cache import KVCache
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.coded import CodedKernels
from engine_worker.layers.shard import UNSHARDED, DeferredPlace, Place, Shard
from engine_worker.models.registry import model_class
from engine_worker.runner.coded_weights import hold_weights
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.torch_forward import TorchForward
from engine_worker.runner.weights import Progress, fill_weights, ignore_progress
from engine_worker.sampling.processors import Warn, ignore_warning
from engine_worker.step import Draw, Slice
from sluice.checkpoint.folder import Checkpoint
from sluice.wire.params import SamplingParams
from tests.engine_worker.models.loading import empty_model

CPU = torch.device("cpu")
BLOCK, BLOCKS = 16, 10


def held(
    checkpoint: Checkpoint,
    kernels: CodedKernels,
    shard: Shard = UNSHARDED,
    config: RunnerConfig = RunnerConfig("cpu"),  # noqa: B008 - frozen
    progress: Progress = ignore_progress,
    warn: Warn = ignore_warning,
):
    architecture = model_class(checkpoint.config)
    shape, place = architecture.read_config(checkpoint.config), Place(torch.float32, CPU, shard)
    model = architecture(shape, ReferenceAttention(shard.heads(shape.heads)), DeferredPlace(*place))
    summary = hold_weights(model, checkpoint, config, place, kernels, progress, warn)
    assert not any(target.is_meta for target in model.targets().values())
    return model, summary


def decoded(checkpoint: Checkpoint, shard: Shard = UNSHARDED):
    model = empty_model(checkpoint, shard)
    fill_weights(model, checkpoint, RunnerConfig("cpu"), lambda *_: None)
    return model


def logits(model, *counts: int) -> torch.Tensor:
    """Of a step with sequences of so many tokens."""
    shape = model.config
    cache = KVCache(
        shape.num_layers,
        BLOCKS * len(counts),
        BLOCK,
        shape.heads.num_kv_heads,
        shape.heads.head_dim,
        torch.float32,
        CPU,
    )
    forward = TorchForward(model, cache, ReferenceAttention(shape.heads), CPU)
    draw = Draw(SamplingParams(temperature=0.0), 0, 0)
    slices = [
        Slice([token % 97 for token in range(count)], 0, list(range(BLOCKS * i, BLOCKS * (i + 1))), (draw,))
        for i, count in enumerate(counts)
    ]
    return forward.logits((), forward.prepare(forward.arrays(slices)))
