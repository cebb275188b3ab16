"""What is done, in which order: first what has to hold, then what is measured, then who else can do it."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from bench.gpu import times
from bench.gpu.checks import attention, chosen, graphs, overlap, parity, ranks, store
from bench.gpu.checks.kernels import candidates
from bench.gpu.findings import Check, Skip
from bench.gpu.measures.context import context
from bench.gpu.measures.generation import AS_SERVED, EAGER, FLAT, FREE, PEAKED, ROUNDS, SPARE, decode, gaps
from bench.gpu.measures.rates import rates
from bench.gpu.measures.throughput import throughput
from bench.gpu.peers.ask import ask
from bench.gpu.peers.catalog import ENTRIES, Entry
from bench.gpu.scale import Scale
from bench.gpu.served import Served, give_back, served
from bench.gpu.session import Session
from bench.gpu.shapes import Shape
from bench.gpu.workload import Workload

READING = 40
"""Steps in which some generate while others' prompts are read, at most."""
ENOUGH = 30.0
"""Seconds below which no other peer is asked."""
SPARE_MEMORY = 4 << 30
"""Bytes beside weights and KV cache, at most."""

Task = Callable[[], str]


class Stages:
    """One run of them."""

    def __init__(self, session: Session, scale: Scale) -> None:
        self._session = session
        self._scale = scale
        self._findings = session.findings
        self._device = session.device
        self._known: set[str] = set()
        """Shapes that were loaded before: what is compiled for them is there."""
        self._dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
        self._forced: dict[str, Any] = {}
        """Options of every runner, over all others."""

    def run(self) -> None:
        """All of them."""
        small, large = self._scale.small, self._scale.large
        self._measure("copy and matrix product", times.RATES, self._rates)
        self._kernels()
        self._check(ranks.title(small.name), times.RANKS, self._ranks)
        if large is not None:
            large = self._fitting(large)
        if large is not None:
            self._alone(large)
        self._small(small)
        if large is not None:
            self._large(large)
        self._peers(large or small)

    def _kernels(self, avoided: frozenset[str] = frozenset()) -> None:
        """`avoided`: titles of kernels that must not run in this process."""
        if store.TITLE not in avoided:
            check = partial(store.check, self._scale.heads, self._dtype, self._device)
            self._check(store.NAME, times.LIBRARY, check)
        cases = attention.cases(self._scale.heads, self._scale.pages, self._scale.longest, self._scale.rounds)
        for one in candidates(self._device, self._dtype):
            if one.title in avoided:
                continue
            check = partial(attention.check, one, cases, self._dtype, self._device)
            self._check(f"attention, {one.title} = reference", times.attention(self._scale, one.compiles), check)

    def _small(self, shape: Shape) -> None:
        """Where a step is short: what graphs and overlap are good for. Three runners, side by side."""
        batch, few = max(self._scale.batches), max(*self._scale.gap_batches, *self._scale.graph_sizes)
        with ExitStack() as stack:
            fast = self._enter(stack, AS_SERVED, shape, batch, overlap=True)
            if fast is None:
                return
            self._chosen(fast)
            self._check(f"greedy = transformers, {shape.name}", times.PARITY, partial(self._parity, fast))
            plain = self._enter(stack, "no overlap", shape, few, overlap=False)
            if plain is not None:
                check = partial(overlap.check, fast, plain, *self._scale.requests)
                self._check(f"overlap = none, {shape.name}", times.LOOPS, check)
            eager = self._enter(stack, EAGER, shape, few, overlap=True, cuda_graphs=False)
            if eager is not None:
                check = partial(graphs.check, fast, eager, self._scale.graph_sizes, self._scale.requests[1])
                self._check(f"graphs = eager, {shape.name}", times.LOOPS, check)
            self._decode(fast, AS_SERVED, self._scale.batches)
            if eager is not None:
                self._decode(eager, EAGER, (1,))
            self._gaps(AS_SERVED, fast, *([] if plain is None else [plain]))
            self._sampled(fast)

    def _sampled(self, fast: Served) -> None:
        """Generation that is not greedy; and, where there is no large shape for them, prompts and throughput."""
        for mode in (FREE, PEAKED, FLAT):
            self._decode(fast, mode, self._scale.sampled_batches)
        self._gaps(PEAKED, fast)
        if self._scale.large is None:
            self._context(fast)
            self._throughput(fast)

    def _alone(self, shape: Shape) -> None:
        """On its own, with nothing left of it afterwards: transformers in float32 takes twice the weights' memory
        beside it."""
        with ExitStack() as stack:
            few = len(self._scale.parity_lengths)
            one = self._enter(stack, "parity", shape, few, cuda_graphs=False, kv_cache_tokens=4096)
            if one is not None:
                self._check(f"greedy = transformers, {shape.name}", times.PARITY, partial(self._parity, one))

    def _large(self, shape: Shape) -> None:
        """Where a step is long: how near it comes to what the device can do."""
        with ExitStack() as stack:
            fast = self._enter(stack, AS_SERVED, shape, max(self._scale.batches), overlap=True)
            if fast is None:
                return
            self._chosen(fast)
            self._decode(fast, AS_SERVED, self._scale.batches)
            self._context(fast)
            self._throughput(fast)
            self._gaps(AS_SERVED, fast)
            for mode in (FREE, PEAKED):
                self._decode(fast, mode, self._scale.gap_batches[-1:])

    def _fitting(self, shape: Shape) -> Shape | None:
        """None, and a word about it, where this GPU has no room for it."""
        if self._device.type != "cuda":
            return shape
        options = self._options(max(self._scale.batches))
        cache = options["kv_cache_tokens"] * shape.kv_elements
        # As served, and in the parity check.
        needed = max(shape.weights + cache, 3 * shape.weights) * self._dtype.itemsize + SPARE_MEMORY
        there = torch.cuda.get_device_properties(self._device).total_memory
        if needed <= there:
            return shape
        self._session.skip(shape.name, f"takes {needed >> 30} GiB, and this GPU has {there >> 30}")
        return None

    def _options(self, batch: int) -> dict[str, Any]:
        tokens = self._scale.prompt + (ROUNDS + 2) * self._scale.steps + SPARE + READING
        return self._scale.options(batch, tokens)

    def _enter(self, stack: ExitStack, title: str, shape: Shape, batch: int, **options: Any) -> Served | None:
        """A runner of this shape, until the stack ends; None where there is none."""
        loaded: list[Served] = []

        def load() -> str:
            wanted = self._options(batch) | options | {"device": self._device.type} | self._forced
            loaded.append(stack.enter_context(served(shape, self._session.folder, **wanted)))
            return ", ".join(f"{name} {value}" for name, value in loaded[0].runner.choices.items())

        seconds = times.AGAIN if shape.name in self._known else times.LOAD
        self._known.add(shape.name)
        self._session.do(f"{shape.name}, {title}", seconds * self._scale.pace, load, needed=True)
        return loaded[0] if loaded else None

    def _chosen(self, one: Served) -> None:
        self._findings.choices[one.shape.name] = dict(one.runner.choices)
        self._check(f"no fallback, {one.shape.name}", 0, partial(chosen.check, one))

    def _ranks(self) -> Check:
        give_back()
        sizes, session = self._scale.graph_sizes, self._session
        options = self._options(max(sizes)) | {"overlap": True}
        return ranks.check(
            self._scale.small, session.folder, self._device, options, sizes, self._scale.requests, session.children
        )

    def _rates(self) -> str:
        self._findings.rates = found = rates(self._device, self._dtype, self._scale.copied, self._scale.side)
        return f"{found.copy_bytes_per_second / 1e9:,.0f} GB/s, {found.flops_per_second / 1e12:,.3g} TFLOP/s"

    def _parity(self, one: Served) -> Check:
        return parity.check(one, self._device, self._scale.parity_lengths, self._scale.parity_steps)

    def _decode(self, one: Served, mode: str, batches: tuple[int, ...]) -> None:
        for batch in batches:

            def measure(batch: int = batch) -> str:
                found = decode(one, mode, batch, self._scale.prompt, self._scale.steps)
                self._findings.decode.append(found)
                return f"{found.tokens_per_second:,.0f} tokens/s, {found.bytes_per_second / 1e9:,.0f} GB/s"

            seconds = times.generation(one.shape, batch, self._scale.prompt)
            self._measure(f"generation, {one.shape.name}, {mode}, batch {batch}", seconds, measure)

    def _gaps(self, mode: str, *runners: Served) -> None:
        for batch in self._scale.gap_batches:
            for one in runners:

                def measure(one: Served = one, batch: int = batch) -> str:
                    found = gaps(one, mode, self._device, batch, self._scale.prompt, self._scale.steps)
                    self._findings.gaps.append(found)
                    return f"idle {found.idle_seconds * 1e6:,.0f} µs of each step's {found.step_seconds * 1e6:,.0f}"

                title = "with" if one.runner.overlap else "without"
                seconds = times.generation(one.shape, batch, self._scale.prompt) + times.PROFILE
                self._measure(f"gaps, {one.shape.name}, {mode}, batch {batch}, {title} overlap", seconds, measure)

    def _context(self, one: Served) -> None:
        def measure() -> str:
            found = context(one, *self._scale.prompts)
            self._findings.context.append(found)
            return f"{found.tokens_per_second:,.0f} tokens/s, {found.flops_per_second / 1e12:,.3g} TFLOP/s"

        seconds = times.SETTLE + 2 * times.context(one.shape, *self._scale.prompts)
        self._measure(f"context, {one.shape.name}", seconds, measure)

    def _throughput(self, one: Served) -> None:
        for work in self._works():

            def measure(work: Workload = work) -> str:
                found = throughput(one, work)
                self._findings.throughput.append(found)
                return f"{found.tokens_per_second:,.0f} tokens/s"

            name = f"side by side, {one.shape.name}, batch {work.batch}: Sluice"
            self._measure(name, times.throughput(work), measure)

    def _peers(self, shape: Shape) -> None:
        waiting = [entry for entry in ENTRIES.values() if find_spec(entry.package) is not None]
        for entry in ENTRIES.values():
            give_back()
            self._peer(entry, shape, len(waiting))
            waiting = [other for other in waiting if other is not entry]

    def _peer(self, entry: Entry, shape: Shape, waiting: int) -> None:
        """`waiting`: peers that share what is left of the budget, this one included."""
        name = f"side by side, {shape.name}: {entry.name}"

        def measure() -> str:
            session = self._session
            seconds = session.budget.left / max(1, waiting)
            found, why = ask(entry, shape, session.folder, self._device, self._works(), session.children, seconds)
            self._findings.throughput += found
            if why:
                self._findings.skipped[name] = why
            rates = [f"batch {one.batch}: {one.tokens_per_second:,.0f} tokens/s" for one in found]
            return "; ".join(rates + ([f"not all: {why}"] if why else []))

        self._measure(name, ENOUGH, measure)

    def _works(self) -> list[Workload]:
        return [Workload(batch, *self._scale.peer_work) for batch in self._scale.peer_batches]

    def _measure(self, name: str, seconds: float, task: Task) -> None:
        """A task that may be left out."""

        def measured() -> str:
            try:
                return task()
            except torch.OutOfMemoryError as error:
                raise Skip(f"out of memory: {str(error).splitlines()[0]}") from error

        self._session.do(name, seconds * self._scale.pace, measured)

    def _check(self, name: str, seconds: float, task: Callable[[], Check]) -> None:
        """A task that ends in a Check; in one that does not hold whatever it raises but a Skip."""

        def checked() -> str:
            try:
                check = task()
            except Skip:
                raise
            except Exception as error:
                said = str(error).partition("\n")[0]
                self._findings.checks.append(Check(name, passed=False, detail=f"{type(error).__name__}: {said}"))
                raise
            self._findings.checks.append(check)
            return f"{'holds' if check.passed else 'DOES NOT HOLD'}: {check.detail}"

        self._session.do(name, seconds * self._scale.pace, checked, needed=True)
