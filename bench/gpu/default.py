"""The default path of users: a KV cache sized by the free memory, graphs, overlap; many requests of two kinds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.gpu.engine import Core, CoreAsk, Served, random_prompts, served
from bench.gpu.findings import DeviceMemory
from bench.gpu.measures import PEAKED, SAMPLING
from bench.gpu.shapes import Shape
from bench.systems.submits import GREEDY
from engine_worker.runner.load import load_runner
from engine_worker.runner.memory import free_memory
from sluice.ring.params import SamplingParams

REQUESTS = 64
KINDS: dict[str, SamplingParams] = {"greedy": GREEDY, "top-p": SAMPLING[PEAKED]}
Record = Callable[[DeviceMemory], None]


@contextmanager
def loaded(shape: Shape, folder: Path, device: torch.device, record: Record, **options: Any) -> Iterator[Served]:
    """Without a KV cache size in the options; `record` gets the memory after each phase of the start."""

    def load(checkpoint: Any, config: Any, progress: Any) -> Any:
        def loading(done: int, total: int) -> None:
            progress(done, total)
            if done >= total:
                record(memory("weights", device))

        def capturing(done: int, total: int) -> None:
            if done == 0:
                record(memory("KV cache", device))
            elif done >= total:
                record(memory(f"{total} graphs", device))

        return load_runner(checkpoint, config, loading, capturing=capturing)

    with served(shape, folder, load, device=device.type, **options) as found:
        record(memory("ready", device))
        yield found


def serve(found: Served, kind: str, prompt: int, output: int) -> str:
    """All requests of a kind at once, to their ends. Raises RuntimeError if one fails or tokens are missing."""
    core = Core(found, KINDS[kind])
    prompts = random_prompts(REQUESTS, prompt, found.shape.vocab_size, seed=len(kind))
    numbers = core.submit([CoreAsk(tokens, output) for tokens in prompts])
    seconds = core.finish()
    short = [number for number in numbers if len(core.drawn[number]) != output]
    if short:
        raise RuntimeError(f"{len(short)} of {REQUESTS} requests have fewer than {output} tokens")
    return f"{REQUESTS} requests, {REQUESTS * output / seconds:,.0f} tokens/s"


def memory(phase: str, device: torch.device) -> DeviceMemory:
    """Now. On a CPU only the free memory is known."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    allocated = torch.cuda.memory_allocated(device) if cuda else 0
    reserved = torch.cuda.memory_reserved(device) if cuda else 0
    return DeviceMemory(phase, allocated, reserved, free_memory(device))
