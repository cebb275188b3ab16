"""An engine around a small real model with LoRA."""

import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine_worker.backend import load_runner
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.runner import ModelRunner
from sluice.wire.adapters import Adapter, AdapterFiles, parts_of
from tests.engine_worker.models.checkpoints import open_written
from tests.fakes.engine import EngineBench, spec_of
from tests.fakes.lanes import until
from tests.fakes.processes import LIMIT

OPENVINO = pytest.param("openvino", marks=pytest.mark.skipif(not find_spec("openvino"), reason="needs openvino"))
BACKENDS = ["torch", OPENVINO]
PAGES = 14 * 16
"""Pages of device memory: enough for several adapters of the small model, which has 14 targets."""


def lora_runner(model: Path, **options) -> ModelRunner:
    settings = {
        "lora": True,
        "lora_folders": (str(model.parent),),
        "lora_num_device_module_layer": 8 * PAGES,
        "kv_cache_tokens": 4096,
        "max_tokens_per_step": 64,
        "device": "cpu",
        "threads": 1,
        "backend": "torch",
    }
    return load_runner(open_written(model), RunnerConfig(**settings | options), *[lambda *_: None] * 3)


def lora_engine(model: Path, *, batching: dict | None = None, **options) -> EngineBench:
    runner = lora_runner(model, **options)
    return EngineBench(
        runner=runner, max_sequence_tokens=400, **{"max_tokens_per_step": 64, "max_batch_size": 16} | (batching or {})
    )


def finish(bench: EngineBench) -> None:
    """Step until all requests have ended; adapters are loaded meanwhile."""
    moved = time.monotonic()
    while (stepped := bench.step()) or bench.engine.live.requests or bench.inbox:
        moved = time.monotonic() if stepped else moved
        assert time.monotonic() - moved < LIMIT, "nothing moves"


def load_first(bench: EngineBench, folders: Iterable[Path]) -> None:
    """Load adapters into host memory, so that requests for them start in the same step."""
    for loading in [bench.runner.adapters.load(str(folder)) for folder in folders]:
        while not loading.poll():
            time.sleep(0.001)


def submit(
    bench: EngineBench, prompt, adapter: Adapter | None, max_tokens: int = 8, temperature: float = 0.0, **options
) -> int:
    """Submit a request, greedy by default, and return its number."""
    number = len(bench.specs) + 1
    spec = spec_of(prompt, max_tokens, request=number, adapter=adapter, **options)
    bench.send(replace(spec, sampling=replace(spec.sampling, temperature=temperature)))
    return number


def offer(library, files: AdapterFiles):
    """Upload files in parts."""
    return library.offer(files.version, [part.data for part in parts_of(files, 1)])


def ended(loading):
    """Poll a preparation until it ends, then return it."""
    until(loading.poll)
    return loading


def held(library) -> list[str]:
    """Versions in host memory, the least recently used first."""
    library.advance()
    return list(library._host._adapters)
