"""The measurements: generation, prompts, idle time and throughput, and the device's own rates in the same run."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu.engine import Core, Served, StepWindow, random_prompts, served
from bench.gpu.findings import Decode, DeviceMemory, Gaps, Join, PromptRate, Rates, Skip, Throughput
from bench.gpu.shapes import Shape, Workload
from bench.systems.direct import GREEDY, freeze_heap
from engine_worker.attention.backend import synchronize
from engine_worker.runner.load import load_runner
from engine_worker.runner.memory import free_memory
from sluice.ring.params import SamplingParams

SLUICE = "Sluice"
AS_SERVED, EAGER, FREE = "as served", "eager", "temperature 1"
PEAKED, FLAT = "top-p 0.9, peaked", "top-p 0.9, flat"
"""Modes. Random weights predict nearly flat distributions: top-p then passes half of the vocabulary, far more than
torch's operations examine in their first pass, which is their worst case. At a low temperature only a few tokens pass,
as with a confident trained model."""
SAMPLING: Mapping[str, SamplingParams] = {
    FREE: SamplingParams(),
    PEAKED: SamplingParams(temperature=0.05, top_p=0.9),
    FLAT: SamplingParams(top_p=0.9),
}
ROUNDS = 3
JOINS, AROUND = 7, 4
"""Prompts that join, and the steps that are timed together: with overlap, the next one begins before one ends."""
SPARE = 32
SHORTEST_GAP = 5e-6
"""Seconds: under the profiler, kernels of one graph are that far apart."""


def fastest(device: torch.device, work: Callable[[], object], rounds: int = 5, repeats: int = 4) -> float:
    """Seconds of one `work`: the least of the rounds, each of `repeats` calls."""
    work()
    found = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(device)
        found.append((time.perf_counter() - began) / repeats)
    return min(found)  # Whatever else the machine does only adds time.


def rates(device: torch.device, dtype: torch.dtype, copied: int, side: int) -> Rates:
    source, target = (torch.zeros(copied, dtype=torch.uint8, device=device) for _ in range(2))
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    copy, product = fastest(device, lambda: target.copy_(source)), fastest(device, lambda: left @ right)
    return Rates(2 * copied / copy, 2 * side**3 / product)


def serve(served: Served, work: Workload, seed: int, sampling: SamplingParams = GREEDY) -> float:
    """Seconds of all requests at once, to their ends. Raises RuntimeError if one fails or tokens are missing."""
    prompts = random_prompts(work.batch, work.prompt_tokens, served.shape.vocab_size, seed)
    core = Core(served, sampling)
    freeze_heap()
    began = time.perf_counter()
    for prompt in prompts:
        core.submit(prompt, work.output_tokens)
    core.finish()
    seconds = time.perf_counter() - began
    if short := sum(len(drawn) != work.output_tokens for drawn in core.drawn):
        raise RuntimeError(f"{short} of {work.batch} requests have fewer than {work.output_tokens} tokens")
    return seconds


def prompt_rate(served: Served, count: int, tokens: int) -> PromptRate:
    """`count` prompts at once, one token after each; the second of two rounds."""
    _, seconds = [serve(served, Workload(count, tokens, 1), seed) for seed in (1, 2)]
    flops = count * (2 * served.shape.matrices * tokens + 2 * served.shape.head_sizes * tokens**2)
    return PromptRate(served.shape.name, count, tokens, count * tokens / seconds, flops / seconds)


def throughput(served: Served, work: Workload) -> Throughput:
    return work.result(SLUICE, served.shape.name, min(serve(served, work, seed) for seed in work.seeds))


@contextmanager
def default_path(
    shape: Shape, folder: Path, device: torch.device, record: Callable[[DeviceMemory], None], **options: Any
) -> Iterator[Served]:
    """As users get it, without a KV cache size; `record` gets the memory after each phase of the start."""

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


def memory(phase: str, device: torch.device) -> DeviceMemory:
    """The current memory of the device. On a CPU only the free memory is known."""
    allocated = reserved = 0
    if device.type == "cuda":
        synchronize(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return DeviceMemory(phase, allocated, reserved, free_memory(device))


def decode(served: Served, mode: str, batch: int, prompt: int, steps: int) -> Decode:
    """The fastest of three windows of `steps`, with all sequences generating."""
    core = _settled(served, mode, batch, prompt, ROUNDS * steps)
    window = _fastest_window(core, steps)
    core.stop()
    step = window.seconds / window.steps
    read = served.weight_bytes + served.token_bytes * window.context / window.steps
    context = window.context // window.tokens
    return Decode(served.shape.name, mode, batch, context, step, window.tokens / window.seconds, read / step)


def gaps(served: Served, mode: str, device: torch.device, batch: int, prompt: int, steps: int) -> Gaps:
    core = _settled(served, mode, batch, prompt, (ROUNDS + 2) * steps)
    window = _fastest_window(core, steps)
    found = idle(device, lambda: core.advance(steps))
    core.stop()
    step = window.seconds / window.steps
    return Gaps(served.shape.name, mode, batch, served.runner.overlap, step, found.total / steps, found.longest)


def join(served: Served, mode: str, batch: int, prompt: int, joining: int) -> Join:
    """A prompt of `joining` tokens beside `batch` sequences; medians of several, each after steps without one."""
    core = _settled(served, mode, batch, prompt, 2 * JOINS * AROUND)
    plain, joined = [], []
    for tokens in random_prompts(JOINS, joining, served.shape.vocab_size, seed=joining):
        plain.append(core.advance(AROUND).seconds)
        core.submit(tokens, 1)
        joined.append(core.advance(AROUND).seconds)
    core.stop()
    step = median(plain) / AROUND
    return Join(served.shape.name, mode, batch, joining, step, median(joined) - (AROUND - 1) * step)


def _fastest_window(core: Core, steps: int) -> StepWindow:
    return min((core.advance(steps) for _ in range(ROUNDS)), key=lambda window: window.seconds)


def _settled(served: Served, mode: str, batch: int, prompt: int, steps: int) -> Core:
    """A core whose sequences all generate, and can for `steps` and some more."""
    core = Core(served, SAMPLING.get(mode, GREEDY))
    # Early sequences generate while the prompts of later ones are read, so they need that many tokens more.
    reading = -(-batch * prompt // served.config.max_tokens_per_step) + batch // served.config.max_batch_size
    for tokens in random_prompts(batch, prompt, served.shape.vocab_size, seed=batch):
        core.submit(tokens, reading + steps + SPARE)
    core.settle()
    # After the requests exist: they live as long as the measurement.
    freeze_heap()
    return core


class Idle(NamedTuple):
    total: float
    longest: float


def idle(device: torch.device, work: Callable[[], object]) -> Idle:
    """Idle time by torch's profiler. Raises Skip if the profiler records nothing."""
    cuda = device.type == "cuda"
    watched = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    # On a CPU the model runs in a thread of the runner's.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[watched], experimental_config=None if cuda else threads) as profiler:
        work()
        synchronize(device)
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    events = profiler.profiler.kineto_results.events()
    spans = [(event.start_ns(), event.end_ns()) for event in events if event.device_type() == kind]
    if not spans:
        raise Skip("torch's profiler saw nothing on the device")
    return uncovered(spans)


def uncovered(spans: Iterable[tuple[int, int]]) -> Idle:
    """Gaps between spans given in nanoseconds, in any order."""
    gaps = [0.0]
    (_, reached), *rest = sorted(spans)
    for start, end in rest:
        gap = (start - reached) * 1e-9
        if gap >= SHORTEST_GAP:
            gaps.append(gap)
        reached = max(reached, end)
    return Idle(sum(gaps), max(gaps))
