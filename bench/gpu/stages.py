"""The tasks: checks, measurements, peers."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, TypeVar

import torch

from bench.gpu import times
from bench.gpu.checks import attention, ranks
from bench.gpu.checks.engine import check_choices
from bench.gpu.checks.kernels import STORE, STORE_CHECK, candidates, check_store
from bench.gpu.checks.parity import check_parity
from bench.gpu.engine import Served, free_unused, served
from bench.gpu.findings import Check, Skip
from bench.gpu.measures import (
    AS_SERVED,
    FLAT,
    FREE,
    PEAKED,
    ROUNDS,
    SPARE,
    decode,
    gaps,
    prompt_rate,
    rates,
    throughput,
)
from bench.gpu.peers.systems import PEERS, PeerKind, measure_peer
from bench.gpu.scale import Scale
from bench.gpu.session import GpuSession
from bench.gpu.shapes import Shape, Workload

READING = 40
"""Most steps in which some sequences generate while others' prompts are read."""
ENOUGH = 30.0
"""Seconds below which no further peer is measured."""
SPARE_MEMORY = 4 << 30

T = TypeVar("T")
Task = Callable[[], str]


class Stages:
    def __init__(self, session: GpuSession, scale: Scale) -> None:
        self._session = session
        self._scale = scale
        self._findings = session.findings
        self._device = session.device
        self._known: set[str] = set()
        """Shapes loaded before: their kernels are compiled."""
        self._dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
        self._forced: dict[str, Any] = {}
        """Options of every runner, overriding all others."""

    def _kernels(self, avoided: frozenset[str] = frozenset()) -> None:
        """`avoided`: titles of kernels that must not run in this process."""
        if STORE not in avoided:
            check = partial(check_store, self._scale.heads, self._dtype, self._device)
            self._check(STORE_CHECK, times.LIBRARY, check)
        cases = attention.cases(self._scale.heads, self._scale.pages, self._scale.longest, self._scale.rounds)
        for one in candidates(self._device, self._dtype):
            if one.title in avoided:
                continue
            check = partial(attention.check, one, cases, self._dtype, self._device)
            self._check(f"attention, {one.title} = reference", times.attention(self._scale, one.compiles), check)

    def _sampled(self, fast: Served) -> None:
        for mode in (FREE, PEAKED, FLAT):
            self._decode(fast, mode, self._scale.sampled_batches)
        self._gaps(PEAKED, fast)
        if self._scale.large is None:
            self._context(fast)
            self._throughput(fast)

    def _alone(self, shape: Shape) -> None:
        """Parity with no other runner in memory: transformers in float32 takes twice the memory of the weights."""
        with ExitStack() as stack:
            few = len(self._scale.parity_lengths)
            one = self._enter(stack, "parity", shape, few, cuda_graphs=False, kv_cache_tokens=4096)
            if one is not None:
                self._check(f"greedy = transformers, {shape.name}", times.PARITY, partial(self._parity, one))

    def _large(self, shape: Shape) -> None:
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
        """None, reported as skipped, if this GPU has no room for it."""
        if self._device.type != "cuda":
            return shape
        options = self._options(max(self._scale.batches))
        cache = options["kv_cache_tokens"] * shape.kv_elements
        # As served, or in the parity check, whichever needs more.
        needed = max(shape.weights + cache, 3 * shape.weights) * self._dtype.itemsize + SPARE_MEMORY
        total = torch.cuda.get_device_properties(self._device).total_memory
        if needed <= total:
            return shape
        self._session.skip(shape.name, f"takes {needed >> 30} GiB, and this GPU has {total >> 30}")
        return None

    def _options(self, batch: int) -> dict[str, Any]:
        tokens = self._scale.prompt + (ROUNDS + 2) * self._scale.steps + SPARE + READING
        return self._scale.options(batch, tokens)

    def _enter(self, stack: ExitStack, title: str, shape: Shape, batch: int, **options: Any) -> Served | None:
        """A runner of this shape, until the stack ends; None if loading failed."""
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
        self._check(f"no fallback, {one.shape.name}", 0, partial(check_choices, one))

    def _ranks(self) -> Check:
        free_unused()  # The memory is needed by other processes.
        sizes, session = self._scale.graph_sizes, self._session
        options = self._options(max(sizes)) | {"overlap": True}
        return ranks.check_ranks(
            self._scale.small, session.folder, self._device, options, sizes, self._scale.requests, session.children
        )

    def _rates(self) -> str:
        self._findings.rates = found = rates(self._device, self._dtype, self._scale.copied, self._scale.side)
        return str(found)

    def _parity(self, one: Served) -> Check:
        return check_parity(one, self._device, self._scale.parity_lengths, self._scale.parity_steps)

    def _decode(self, one: Served, mode: str, batches: tuple[int, ...]) -> None:
        for batch in batches:
            name = f"generation, {one.shape.name}, {mode}, batch {batch}"
            measure = partial(decode, one, mode, batch, self._scale.prompt, self._scale.steps)
            seconds = times.generation(one.shape, batch, self._scale.prompt)
            self._record(name, seconds, measure, self._findings.decode)

    def _gaps(self, mode: str, *runners: Served) -> None:
        for batch, one in product(self._scale.gap_batches, runners):
            title = "with" if one.runner.overlap else "without"
            name = f"gaps, {one.shape.name}, {mode}, batch {batch}, {title} overlap"
            measure = partial(gaps, one, mode, self._device, batch, self._scale.prompt, self._scale.steps)
            seconds = times.generation(one.shape, batch, self._scale.prompt) + times.PROFILE
            self._record(name, seconds, measure, self._findings.gaps)

    def _context(self, one: Served) -> None:
        seconds = times.SETTLE + 2 * times.context(one.shape, *self._scale.prompts)
        measure = partial(prompt_rate, one, *self._scale.prompts)
        self._record(f"context, {one.shape.name}", seconds, measure, self._findings.context)

    def _throughput(self, one: Served) -> None:
        for work in self._works():
            name = f"side by side, {one.shape.name}, batch {work.batch}: Sluice"
            self._record(name, times.throughput(work), partial(throughput, one, work), self._findings.throughput)

    def _record(self, name: str, seconds: float, measure: Callable[[], T], into: list[T]) -> None:
        def measured() -> str:
            into.append(measure())
            return str(into[-1])

        self._measure(name, seconds, measured)

    def _peers(self, shape: Shape) -> None:
        waiting = [kind for kind in PEERS.values() if find_spec(kind.package) is not None]
        for kind in PEERS.values():
            free_unused()  # The memory is needed by another process.
            self._peer(kind, shape, len(waiting))
            waiting = [other for other in waiting if other is not kind]

    def _peer(self, kind: PeerKind, shape: Shape, waiting: int) -> None:
        """`waiting`: peers that share the remaining budget, this one included."""
        name = f"side by side, {shape.name}: {kind.name}"

        def measure() -> str:
            session = self._session
            seconds = session.budget.left / max(1, waiting)
            found, why = measure_peer(
                kind, shape, session.folder, self._device, self._works(), session.children, seconds
            )
            self._findings.throughput += found
            if why:
                self._findings.skipped[name] = why
            rates = [f"batch {one.batch}: {one}" for one in found]
            return "; ".join(rates + ([f"not all: {why}"] if why else []))

        self._measure(name, ENOUGH, measure)

    def _works(self) -> list[Workload]:
        return [Workload(batch, *self._scale.peer_work) for batch in self._scale.peer_batches]

    def _measure(self, name: str, seconds: float, task: Task) -> None:
        def measured() -> str:
            try:
                return task()
            except torch.OutOfMemoryError as error:
                raise Skip(f"out of memory: {str(error).splitlines()[0]}") from error

        self._session.do(name, seconds * self._scale.pace, measured)

    def _check(self, name: str, seconds: float, task: Callable[[], Check]) -> None:
        """A task that returns a Check. Any exception but Skip becomes a failed Check."""

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
