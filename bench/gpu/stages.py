"""What is done, in which order: first what has to hold, then what is measured, then who else can do it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from bench.gpu.checks import attention, graphs, overlap, parity
from bench.gpu.checks.kernels import candidates
from bench.gpu.findings import Check
from bench.gpu.measures.context import context
from bench.gpu.measures.generation import AS_SERVED, EAGER, ROUNDS, SPARE, decode, gaps
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

Task = Callable[[], str]


class Stages:
    """One run of them."""

    def __init__(self, session: Session, scale: Scale) -> None:
        self._session = session
        self._scale = scale
        self._findings = session.findings
        self._device = session.device
        self._dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32

    def run(self) -> None:
        """All."""
        self._do("copy and matrix product", 5, self._rates)
        cases = attention.cases(self._scale.heads, self._scale.pages, self._scale.longest, self._scale.rounds)
        for one in candidates(self._device, self._dtype):
            check = partial(attention.check, one, cases, self._dtype, self._device)
            self._check(f"attention, {one.title} = reference", 15, check)
        self._small(self._scale.small)
        if self._scale.large is not None:
            self._large(self._scale.large)
        shape = self._scale.large or self._scale.small
        waiting = [entry for entry in ENTRIES.values() if find_spec(entry.package) is not None]
        for entry in ENTRIES.values():
            give_back()
            self._peer(entry, shape, len(waiting))
            waiting = [other for other in waiting if other is not entry]

    def _small(self, shape: Shape) -> None:
        """Where a step is short: what graphs and overlap are good for."""
        batch = max(self._scale.batches)
        with ExitStack() as stack:
            fast = self._enter(stack, AS_SERVED, shape, batch, overlap=True)
            if fast is None:
                return
            self._findings.choices[shape.name] = fast.runner.choices
            self._check(f"greedy = transformers, {shape.name}", 25, partial(self._parity, fast))
            self._decode(fast, AS_SERVED, self._scale.batches)
            if self._scale.large is None:
                self._context(fast)
                self._throughput(fast)
            batch = max(*self._scale.gap_batches, *self._scale.graph_sizes)
            plain = self._enter(stack, "no overlap", shape, batch, overlap=False)
            if plain is not None:
                name = f"overlap = none, {shape.name}"
                self._check(name, 15, partial(overlap.check, fast, plain, *self._scale.requests))
                self._gaps(fast, plain)
            eager = self._enter(stack, EAGER, shape, batch, overlap=True, cuda_graphs=False)
            if eager is not None:
                sizes, longest = self._scale.graph_sizes, self._scale.requests[1]
                self._check(f"graphs = eager, {shape.name}", 20, partial(graphs.check, fast, eager, sizes, longest))
                self._decode(eager, EAGER, (1,))

    def _large(self, shape: Shape) -> None:
        """Where a step is long: how near it comes to what the device can do."""
        few = len(self._scale.parity_lengths)
        # On its own: transformers in float32 takes twice the weights' memory beside it.
        with ExitStack() as stack:
            alone = self._enter(stack, "parity", shape, few, cuda_graphs=False, kv_cache_tokens=4096)
            if alone is not None:
                self._check(f"greedy = transformers, {shape.name}", 40, partial(self._parity, alone))
        with ExitStack() as stack:
            fast = self._enter(stack, AS_SERVED, shape, max(self._scale.batches), overlap=True)
            if fast is None:
                return
            self._findings.choices[shape.name] = fast.runner.choices
            self._decode(fast, AS_SERVED, self._scale.batches)
            self._context(fast)
            self._throughput(fast)
            self._gaps(fast)

    def _enter(self, stack: ExitStack, title: str, shape: Shape, batch: int, **options: Any) -> Served | None:
        """A runner of this shape, until the stack ends; None where there is none."""
        tokens = self._scale.prompt + (ROUNDS + 2) * self._scale.steps + SPARE + READING
        wanted = self._scale.options(batch, tokens) | options
        loaded: list[Served] = []

        def load() -> str:
            one: AbstractContextManager[Served] = served(
                shape, self._session.folder, **wanted, device=self._device.type
            )
            loaded.append(stack.enter_context(one))
            return ", ".join(f"{name} {value}" for name, value in loaded[0].runner.choices.items())

        self._do(f"{shape.name}, {title}", 15, load)
        return loaded[0] if loaded else None

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

            self._do(f"generation, {one.shape.name}, {mode}, batch {batch}", 3 + batch / 16, measure)

    def _gaps(self, *both: Served) -> None:
        for batch in self._scale.gap_batches:
            for one in both:

                def measure(one: Served = one, batch: int = batch) -> str:
                    found = gaps(one, self._device, batch, self._scale.prompt, self._scale.steps)
                    self._findings.gaps.append(found)
                    return f"idle {found.idle_seconds * 1e6:,.0f} µs of each step's {found.step_seconds * 1e6:,.0f}"

                title = "with" if one.runner.overlap else "without"
                self._do(f"gaps, {one.shape.name}, batch {batch}, {title} overlap", 8, measure)

    def _context(self, one: Served) -> None:
        def measure() -> str:
            found = context(one, *self._scale.prompts)
            self._findings.context.append(found)
            return f"{found.tokens_per_second:,.0f} tokens/s, {found.flops_per_second / 1e12:,.3g} TFLOP/s"

        self._do(f"context, {one.shape.name}", 8, measure)

    def _throughput(self, one: Served) -> None:
        for work in self._works():

            def measure(work: Workload = work) -> str:
                found = throughput(one, work)
                self._findings.throughput.append(found)
                return f"{found.tokens_per_second:,.0f} tokens/s"

            self._do(f"side by side, {one.shape.name}, batch {work.batch}: Sluice", 8, measure)

    def _peer(self, entry: Entry, shape: Shape, waiting: int) -> None:
        """`waiting`: peers that share what is left of the budget, this one included."""
        name = f"side by side, {shape.name}: {entry.name}"

        def measure() -> str:
            seconds = self._session.budget.left / max(1, waiting)
            found, why = ask(entry, shape, self._session.folder, self._device, self._works(), seconds)
            self._findings.throughput += found
            if why:
                self._findings.skipped[name] = why
            rates = [f"batch {one.batch}: {one.tokens_per_second:,.0f} tokens/s" for one in found]
            return "; ".join(rates + ([f"not all: {why}"] if why else []))

        self._do(name, ENOUGH, measure)

    def _works(self) -> list[Workload]:
        return [Workload(batch, *self._scale.peer_work) for batch in self._scale.peer_batches]

    def _do(self, name: str, seconds: float, task: Task) -> None:
        self._session.do(name, seconds * self._scale.pace, task)

    def _check(self, name: str, seconds: float, task: Callable[[], Check]) -> None:
        """A task that ends in a Check."""

        def checked() -> str:
            check = task()
            self._findings.checks.append(check)
            return f"{'holds' if check.passed else 'DOES NOT HOLD'}: {check.detail}"

        self._do(name, seconds, checked)
