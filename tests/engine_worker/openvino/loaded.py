"""Loads runners on OpenVINO from small random checkpoints."""

from pathlib import Path

import torch

from engine_worker.backend import load_runner
from engine_worker.lora.checkpoint import AdapterWeights, ModuleWeights
from engine_worker.lora.device import LoadPlan
from engine_worker.openvino.forward import OpenVinoForward
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.extensions import NO_EXTENSIONS, Extensions
from engine_worker.runner.runner import ModelRunner
from engine_worker.runner.weights import ignore_progress
from engine_worker.sampling.processors import Warn, ignore_warning
from engine_worker.step import AdapterLoad
from tests.engine_worker.models.checkpoints import open_written


def load(
    folder: Path, extensions: Extensions = NO_EXTENSIONS, warn: Warn = ignore_warning, **options: object
) -> ModelRunner:
    config = RunnerConfig("cpu", **{"backend": "openvino", "kv_cache_tokens": 4096, "threads": 1} | options)
    return load_runner(open_written(folder), config, ignore_progress, ignore_progress, warn, extensions=extensions)


def load_adapter(forward: OpenVinoForward, number: int) -> None:
    """Copy a random adapter of all linear maps to the device."""
    random, targets = torch.Generator().manual_seed(number), forward.adapters.targets
    a, b = (
        [torch.randn(3 * number, span.size, generator=random) * 0.1 for span in spans]
        for spans in ([target.inputs for target in targets], [target.outputs for target in targets])
    )
    weights = AdapterWeights(tuple(map(ModuleWeights, targets, a, b)))
    count = weights.num_pages(forward.adapters.placed.page_ranks)
    pages = tuple(range(number * count, (number + 1) * count))
    forward.load_adapters([LoadPlan.of(AdapterLoad(number, "", pages), weights)], [weights])
