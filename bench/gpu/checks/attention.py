"""Each attention backend against `reference`, on random pages, lengths and windows; Triton's store against torch's."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product, takewhile
from typing import NamedTuple

import torch

from bench.gpu.findings import Outcome, Skip
from engine_worker.attention import flash
from engine_worker.attention.backend import (
    AttentionBackend,
    AttentionInputs,
    HeadShape,
    Refusal,
    RefusedError,
    Site,
    capability_of,
)
from engine_worker.attention.cache import KVCache
from engine_worker.attention.choice import KERNELS, try_kernel
from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.paged import Kernel, Store, triton_store
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.attention.trial import verify_store

ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Absolute and relative: the reference computes in float32 and rounds once, others round in between."""
PADDING = 3
"""At the end of every other step, as the engine pads: tokens of no sequence, or in generation steps, which graphs pad,
sequences without a context. FlashAttention-2 rejects the former if every sequence has one token."""
BATCHES = (3, 17)
"""Sequences: kernels split the keys of a small batch over the device, those of a large one less or not at all. Few of
them, few windows and one longest context, because each may compile another kernel."""
WINDOWS = (None, 1, 100)
GENERATION_FIRST = 0.5
"""Share of the cases that begin with the sequences of one token, as the engine orders them."""

Make = Callable[[HeadShape, int | None, int], AttentionBackend]
"""(heads, window, tokens per block) → a backend. Raises RefusedError if it is not meant for these, or fails."""
STORE = "Triton's store"
COMPILED = {kernel.title for kernel in flash.KERNELS} - {"FlashAttention-4"}
"""Ahead of time; the others compile on first use."""

Query = Callable[[random.Random, int], int]
"""(random source, context) → tokens of the sequence in this step."""

KINDS: Sequence[Query] = (
    lambda _source, _context: 1,
    lambda _source, context: context,
    lambda source, context: source.randint(1, context),
    lambda source, context: source.choice([1, context, source.randint(1, context)]),
)
"""Steps of generation, of whole prompts, of chunks, and mixed ones."""


class Candidate(NamedTuple):
    title: str
    make: Make

    @property
    def compiles(self) -> bool:
        return self.title not in COMPILED


def candidates(device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    found = [paged(kernel, device, dtype) for kernel in KERNELS]
    if device.type == "cpu":
        found.insert(0, Candidate("cpu", lambda heads, window, _: CpuAttention(heads, (window,))))
    return found


def paged(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Candidate:
    # Each trial takes longer than a case, and may compile.
    @cache
    def tried(heads: HeadShape, windowed: bool, tokens_per_block: int) -> AttentionBackend:
        windows = (1,) if windowed else (None,)
        site = Site(device, capability_of(device), dtype, heads, windows, tokens_per_block)
        return try_kernel(kernel, site).backend

    return Candidate(kernel.title, lambda heads, window, size: tried(heads, window is not None, size))


class Rows(NamedTuple):
    query: int
    context: int


EMPTY = Rows(1, 0)


@dataclass(frozen=True, slots=True)
class Case:
    heads: HeadShape
    tokens_per_block: int
    window: int | None
    rows: tuple[Rows, ...]
    padding: int
    seed: int

    @property
    def tokens(self) -> int:
        """Of sequences with a context; padding comes after them."""
        return sum(row.query for row in self.rows if row.context)


def cases(heads: Sequence[HeadShape], pages: Sequence[int], longest: int, rounds: int) -> list[Case]:
    source = random.Random(5)
    return [
        _case(source, shape, size, longest, query, PADDING * (i % 2))
        for shape, size, i, query in product(heads, pages, range(rounds), KINDS)
    ]


def _case(
    source: random.Random, heads: HeadShape, tokens_per_block: int, longest: int, query: Query, padding: int
) -> Case:
    contexts = [longest, *(source.randint(1, longest) for _ in range(source.choice(BATCHES) - 1))]
    source.shuffle(contexts)
    rows = [Rows(query(source, length), length) for length in contexts]
    if source.random() < GENERATION_FIRST:
        rows.sort(key=lambda row: row.query > 1)
    if all(row.query == 1 for row in rows):
        rows, padding = _padded(rows, padding), 0
    return Case(heads, tokens_per_block, source.choice(WINDOWS), tuple(rows), padding, source.getrandbits(32))


def _padded(rows: list[Rows], padding: int) -> list[Rows]:
    count = len(rows) - min(padding, len(rows) - 1)
    longest = max(rows)
    rest = [row for row in rows if row is not longest]
    return [longest, *rest[: count - 1], *[EMPTY] * (len(rows) - count)]


def check(candidate: Candidate, given: Sequence[Case], dtype: torch.dtype, device: torch.device) -> Outcome:
    """All cases that the backend is meant for. Raises Skip without any, and what the backend raises, with the case."""
    refused, most, count = "", 0.0, 0
    for case in given:
        try:
            backend = candidate.make(case.heads, case.window, case.tokens_per_block)
            off, stored = deviation(backend, case, dtype, device)
        except Exception as error:
            if isinstance(error, RefusedError) and error.kind is Refusal.ABSENT:
                refused = error.reason
                continue
            error.add_note(f"in {case}")
            raise
        count += 1
        most = max(most, off)
        if off > 1 or not stored:
            what = f"off by {off:.1f} of what is allowed" if stored else "keys and values are not in their slots"
            return Outcome(False, f"{what}: {case}")
    if not count:
        raise Skip(refused)
    some = "" if not refused else f"; {len(given) - count} others: {refused}"
    return Outcome(True, f"{count} steps, off by {most:.2f} of what is allowed at most{some}")


@torch.inference_mode()
def deviation(backend: AttentionBackend, case: Case, dtype: torch.dtype, device: torch.device) -> tuple[float, bool]:
    """The largest, as a share of the allowed one; and whether both caches hold the same."""
    generator = torch.Generator(device).manual_seed(case.seed)
    inputs = _inputs(case, device)
    heads, tokens = case.heads, len(inputs.slots)
    query, key, value = (
        torch.randn(tokens, count, heads.head_dim, generator=generator, device=device).to(dtype)
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    outputs, contents = [], []
    for one in (ReferenceAttention(heads), backend):
        pool = _pool(case, int(inputs.block_tables.max()) + 1, dtype, device)
        out = one.attend(query, key, value, pool.layers[0], one.prepare(inputs, pool), case.window)
        outputs.append(out[: case.tokens].float())
        contents.append(torch.stack((pool.layers[0].keys, pool.layers[0].values)))
    wanted, found = outputs
    allowed = ALLOWED[dtype] * (1 + wanted.abs())
    return float(((found - wanted).abs() / allowed).nan_to_num(nan=torch.inf).max()), torch.equal(*contents)


def _inputs(case: Case, device: torch.device) -> AttentionInputs:
    """Blocks in random order; table entries past a sequence's own point at another's block."""
    source, size = random.Random(case.seed), case.tokens_per_block
    counts = [-(-row.context // size) for row in case.rows]
    blocks = list(range(sum(counts)))
    source.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    padded = [table + [0] * (max(counts) - len(table)) for table in tables]
    slots = [
        table[at // size] * size + at % size
        for table, row in zip(tables, case.rows, strict=True)
        for at in range(max(0, row.context - row.query), row.context)
    ]
    slots += [-1] * (case.rows.count(EMPTY) + case.padding)
    starts = [sum(row.query for row in case.rows[:i]) for i in range(len(case.rows) + 1)]
    return AttentionInputs(
        slots=torch.tensor(slots, device=device),
        block_tables=torch.tensor(padded, dtype=torch.int32, device=device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lengths=torch.tensor([row.context for row in case.rows], dtype=torch.int32, device=device),
        generation_rows=len(list(takewhile(lambda row: row.query == 1, case.rows))),
        max_query=max(row.query for row in case.rows),
        max_context=max(row.context for row in case.rows),
    )


def _pool(case: Case, blocks: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """The same for each backend, and no zeros: what a backend must not write would show."""
    heads = case.heads
    pool = KVCache(1, blocks, case.tokens_per_block, heads.num_kv_heads, heads.head_dim, dtype, device)
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    for half in (pool.layers[0].keys, pool.layers[0].values):
        half.normal_(generator=generator)
    return pool


def check_store(heads: Sequence[HeadShape], dtype: torch.dtype, device: torch.device) -> Outcome:
    """Raises Skip without Triton or a GPU, and RefusedError if the store is wrong."""
    if device.type == "cpu":
        raise Skip("it needs a CUDA device")
    try:
        store = triton_store()
    except ModuleNotFoundError as error:
        raise Skip(str(error)) from error
    return compare_stores(store, heads, dtype, device)


def compare_stores(store: Store, heads: Sequence[HeadShape], dtype: torch.dtype, device: torch.device) -> Outcome:
    for one in heads:
        verify_store(store, Site(device, capability_of(device), dtype, one, (None,), 0))
    return Outcome(True, f"{len(heads)} shapes of heads")
