"""The measurements: generation, prompts, idle time, throughput, and the device's bandwidth and arithmetic rate."""

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
from sluice.wire.params import SamplingParams

SLUICE = "Sluice"
AS_SERVED, EAGER, FREE = "as served", "eager", "temperature 1"
PEAKED, FLAT = "top-p 0.9, peaked", "top-p 0.9, flat"
"""Modes. Random weights predict nearly flat distributions. Top-p then keeps half of the vocabulary, far more than
torch's operations examine in their first pass, which is their worst case. At a low temperature it keeps only a few
tokens, as with a trained model that is confident."""
COPYING, NOT_COPYING = "blocks copied to a file", "the same, not copied"
"""Modes, of a runner whose KV blocks are in a file, see bench.gpu.pool_files."""
SAMPLING: Mapping[str, SamplingParams] = {
    FREE: SamplingParams(),
    PEAKED: SamplingParams(temperature=0.05, top_p=0.9),
    FLAT: SamplingParams(top_p=0.9),
}
ROUNDS = 3
"""Windows of steps per measurement; the fastest counts."""
JOINS, AROUND = 7, 4
"""Prompts that join, and steps that are timed together for each: with overlap, a step begins before the previous one
ends."""
SPARE = 32
"""Tokens that sequences may generate beyond the measured steps."""
SHORTEST_GAP = 5e-6
"""Seconds. Shorter gaps do not count as idle time: under the profiler, there are such gaps between the kernels of a
graph."""


def fastest(device: torch.device, work: Callable[[], object], rounds: int = 5, repeats: int = 4) -> float:
    """Seconds per call of `work`, from the fastest round of `repeats` calls."""
    work()
    found = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(device)
        found.append((time.perf_counter() - began) / repeats)
    return min(found)  # Other activity on the machine can only add time.


def rates(device: torch.device, dtype: torch.dtype, copied: int, side: int) -> Rates:
    """Copies `copied` bytes, and multiplies square matrices of `side` rows."""
    source, target = (torch.zeros(copied, dtype=torch.uint8, device=device) for _ in range(2))
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    copy, product = fastest(device, lambda: target.copy_(source)), fastest(device, lambda: left @ right)
    return Rates(2 * copied / copy, 2 * side**3 / product)


def serve(served: Served, work: Workload, seed: int, sampling: SamplingParams = GREEDY) -> float:
    """Seconds until all requests, submitted together, have ended. Raises RuntimeError if one fails or is too short."""
    prompts = random_prompts(work.batch, work.prompt_tokens, served.shape.vocab_size, seed)
    core = Core(served, sampling)
    freeze_heap()
    began = time.perf_counter()
    for prompt in prompts:
        core.submit(prompt, work.output_tokens)
    core.finish()
    seconds = time.perf_counter() - began
    if short := sum(len(drawn) != work.output_tokens for drawn in core.drawn):
        raise RuntimeError(f"{short} of {work.batch} requests did not generate {work.output_tokens} tokens")
    return seconds


def prompt_rate(served: Served, count: int, tokens: int) -> PromptRate:
    """Rate of `count` prompts submitted together, with one output token each, in the second of two rounds."""
    _, seconds = [serve(served, Workload(count, tokens, 1), seed) for seed in (1, 2)]
    flops = count * (2 * served.shape.matrices * tokens + 2 * served.shape.head_sizes * tokens**2)
    return PromptRate(served.shape.name, count, tokens, count * tokens / seconds, flops / seconds)


def throughput(served: Served, work: Workload) -> Throughput:
    return work.result(SLUICE, served.shape.name, min(serve(served, work, seed) for seed in work.seeds))


@contextmanager
def default_path(
    shape: Shape, folder: Path, device: torch.device, record: Callable[[DeviceMemory], None], **options: Any
) -> Iterator[Served]:
    """Load a runner with the default settings, including the KV cache size. `record` is called with the memory in use
    after each phase of the start."""

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
    """The device's memory in use now. On a CPU only the free memory is known."""
    allocated = reserved = 0
    if device.type == "cuda":
        synchronize(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return DeviceMemory(phase, allocated, reserved, free_memory(device))


def decode(served: Served, mode: str, batch: int, prompt: int, steps: int, spread: int = 0) -> Decode:
    """Measures windows of `steps` in which all sequences generate; the fastest of three counts. `spread`: the prompts
    differ in length by up to this number of tokens, so that not all sequences fill their blocks in the same steps."""
    core = _settled(served, mode, batch, prompt, ROUNDS * steps, spread)
    window = _fastest_window(core, steps)
    core.stop()
    step = window.seconds / window.steps
    read = served.step_bytes(batch) + served.token_bytes * window.context / window.steps
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
    """Measures the step in which a prompt of `joining` tokens is processed together with `batch` generating sequences.

    Medians of several prompts; before each, the same number of steps is timed without one.
    """
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


def _settled(served: Served, mode: str, batch: int, prompt: int, steps: int, spread: int = 0) -> Core:
    """A core whose sequences all generate, and can continue for a little more than `steps` steps."""
    core = Core(served, SAMPLING.get(mode, GREEDY))
    # The first sequences already generate while the prompts of later ones are processed: allow for these tokens.
    reading = -(-batch * prompt // served.config.max_tokens_per_step) + batch // served.config.max_batch_size
    for index, tokens in enumerate(random_prompts(batch, prompt + spread, served.shape.vocab_size, seed=batch)):
        core.submit(tokens[: prompt + index % (spread + 1)], reading + steps + SPARE)
    core.settle()
    # Only now, so that the requests' objects, which live during the whole measurement, are frozen too.
    freeze_heap()
    return core


class Idle(NamedTuple):
    total: float
    longest: float


def idle(device: torch.device, work: Callable[[], object]) -> Idle:
    """Idle time of the device during `work`, by torch's profiler. Raises Skip if the profiler records nothing."""
    cuda = device.type == "cuda"
    watched = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    # On a CPU, the model runs in a thread that the runner starts.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[watched], experimental_config=None if cuda else threads) as profiler:
        work()
        synchronize(device)
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    events = profiler.profiler.kineto_results.events()
    spans = [(event.start_ns(), event.end_ns()) for event in events if event.device_type() == kind]
    if not spans:
        raise Skip("torch's profiler recorded nothing on the device")
    return uncovered(spans)


def uncovered(spans: Iterable[tuple[int, int]]) -> Idle:
    """Gaps in seconds between spans, which are given in nanoseconds, in any order."""
    gaps = [0.0]
    (_, reached), *rest = sorted(spans)
    for start, end in rest:
        gap = (start - reached) * 1e-9
        if gap >= SHORTEST_GAP:
            gaps.append(gap)
        reached = max(reached, end)
    return Idle(sum(gaps), max(gaps))
