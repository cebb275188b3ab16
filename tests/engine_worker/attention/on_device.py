"""Compares an attention backend with the reference in many random steps, on this machine's GPU if it has one."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from engine_worker.attention.backend import AttentionBackend, HeadShape, Refusal, RefusedError, Site, capability_of
from engine_worker.attention.choice import KERNELS, try_kernel
from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.paged import Kernel
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.attention.trial import as_captured
from tests.engine_worker.attention.paged import PagedStep, attend, paged_step, pools

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
HEADS = (
    [HeadShape(16, 8, 128), HeadShape(32, 8, 128), HeadShape(14, 2, 64), HeadShape(8, 4, 256)]
    if ON_GPU
    else [HeadShape(4, 2, 64), HeadShape(2, 2, 32)]
)
PAGES, LONGEST, ROUNDS = ((16, 256), 1500, 3) if ON_GPU else ((16,), 300, 2)
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Allowed error, absolute and relative: the reference computes in float32 and rounds once, kernels also round
intermediate results."""
PADDING = 3
"""Every second step ends with this much padding, like the engine's steps: tokens of no sequence or, in generation
steps, which are padded for CUDA graphs, sequences with context length 0. FlashAttention-2 rejects the former if every
sequence has one token."""
BATCHES = (3, 17)
"""Numbers of sequences: kernels split the keys of a small batch over the GPU, those of a large batch less or not at
all. There are few batch sizes and windows, and one longest context, because each may compile another kernel."""
WINDOWS = {False: (None,), True: (1, 100)}
KINDS = (
    lambda source, context: 1,
    lambda source, context: context,
    lambda source, context: source.randint(1, context),
    lambda source, context: source.choice([1, context, source.randint(1, context)]),
)
"""Query tokens of a sequence in steps of generation, of whole prompts, of chunks, and in mixed steps."""

Make = Callable[[HeadShape, bool, int], AttentionBackend]
"""(heads, windowed, tokens per block) -> a backend. Raises RefusedError if it does not support these, or fails."""


def by_kernel(kernel: Kernel, device: torch.device = DEVICE, dtype: torch.dtype = DTYPE) -> Make:
    def make(heads: HeadShape, windowed: bool, size: int) -> AttentionBackend:
        windows = (1,) if windowed else (None,)
        return try_kernel(kernel, Site(device, capability_of(device), dtype, heads, windows, size)).backend

    return make


def on_cpu(heads: HeadShape, windowed: bool, size: int) -> AttentionBackend:
    if ON_GPU:
        raise RefusedError(Refusal.ABSENT, "it needs a CPU")
    return CpuAttention(heads, WINDOWS[windowed])


BACKENDS = {kernel.title: by_kernel(kernel) for kernel in KERNELS} | {"cpu": on_cpu}


def steps(heads: HeadShape, size: int, dtype: torch.dtype, device: torch.device) -> Iterator[PagedStep]:
    source = random.Random(5)
    for i, query in product(range(ROUNDS), KINDS):
        contexts = [LONGEST, *(source.randint(1, LONGEST) for _ in range(source.choice(BATCHES) - 1))]
        source.shuffle(contexts)
        queries = [query(source, context) for context in contexts]
        rows = [(context - count, count) for context, count in zip(contexts, queries, strict=True)]
        if source.random() < 0.5:
            rows.sort(key=lambda row: row[1] > 1)  # Generation rows first, as the engine orders them.
        padding, generation = PADDING * (i % 2), all(count == 1 for count in queries)
        if generation:
            rows.sort(reverse=True)  # The longest comes first, so that it is not replaced by padding.
        options = {"tokens_per_block": size, "dtype": dtype, "device": device, "seed": source.getrandbits(32)}
        step = paged_step(heads, rows, padding=0 if generation else padding, **options)
        step.inputs.block_tables.clamp_(min=0)
        if generation and padding:
            count = min(padding, len(rows) - 1)
            step.inputs.slots[-count:], step.inputs.context_lengths[-count:] = -1, 0
        yield step


@torch.inference_mode()
def deviation(
    backend: AttentionBackend, heads: HeadShape, step: PagedStep, window: int | None, *, captured: bool = False
) -> float:
    """The largest error, divided by the allowed error. Raises AssertionError if the caches differ afterwards."""
    expected, expected_cache = attend(ReferenceAttention(heads), step, window)
    form = replace(step, inputs=as_captured(step.inputs)) if captured else step
    out, cache = attend(backend, form, window)
    assert all(map(torch.equal, pools(cache), pools(expected_cache))), "keys and values are not in their slots"
    real = int(step.inputs.query_start[int((step.inputs.context_lengths > 0).sum())])
    expected, out = expected[:real].float(), out[:real].float()
    allowed = ALLOWED[step.query.dtype] * (1 + expected.abs())
    return float(((out - expected).abs() / allowed).nan_to_num(nan=torch.inf).max())


def check(make: Make, dtype: torch.dtype = DTYPE, device: torch.device = DEVICE, heads=tuple(HEADS)) -> str:
    """Returns a summary. Skips the test if the backend supports none of these heads, block sizes and windows."""
    refused, largest, count = set(), 0.0, 0
    for shape, size, windowed in product(heads, PAGES, WINDOWS):
        try:
            backend = make(shape, windowed, size)
        except RefusedError as error:
            if error.kind is not Refusal.ABSENT:
                raise
            refused.add(error.reason)
            continue
        for i, step in enumerate(steps(shape, size, dtype, device)):
            window = WINDOWS[windowed][i % len(WINDOWS[windowed])]
            forms = [False, True] if backend.context_graphs else [False]
            error = max(deviation(backend, shape, step, window, captured=captured) for captured in forms)
            assert error <= 1, (
                f"off by {error:.1f} of the allowed error: step {i}, {shape}, blocks of {size}, window {window}"[:200]
            )
            largest, count = max(largest, error), count + 1
    if not count:
        pytest.skip("; ".join(sorted(refused)))
    return "; ".join([f"{count} steps, off by {largest:.2f} of the allowed error at most", *sorted(refused)])
