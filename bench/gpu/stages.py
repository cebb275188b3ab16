"""The tasks of a run: checks, measurements, comparisons with peers."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, TypeVar

import torch

from bench.gpu.checks import check_choices, check_parity
from bench.gpu.engine import Served, free_unused, served
from bench.gpu.findings import Check, Outcome, Skip
from bench.gpu.measures import AS_SERVED, ROUNDS, SLUICE, SPARE, decode, gaps, join, prompt_rate, rates, throughput
from bench.gpu.peers import PEERS, PeerKind, measure_peer
from bench.gpu.pool_files import check_copies, copying, engines
from bench.gpu.scale import AGAIN, LOAD, LOOPS, MEASURE, TESTS, Scale
from bench.gpu.session import GpuSession
from bench.gpu.shapes import Shape, quantized
from bench.gpu.suite import run_tests

READING = 40
"""Maximum number of steps in which some sequences generate while the prompts of others are processed."""
ENOUGH = 30.0
"""Seconds. A peer is measured only if this much of the budget remains."""
BLOCK = 16
"""Tokens per block where blocks are in a file."""
SPARE_MEMORY = 4 << 30
"""Bytes of a GPU left for everything except weights and KV cache."""

T = TypeVar("T")


class Stages:
    def __init__(self, session: GpuSession, scale: Scale) -> None:
        self._session = session
        self._scale = scale
        self._findings = session.findings
        self._device = session.device
        self._dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
        self._runners = ExitStack()
        """The loaded runners. Entered once for each group of runners that are in memory together."""
        self._known: set[str] = set()
        """Names of the shapes that were loaded before, so that their kernels are compiled."""
        self._forced: dict[str, Any] = {}
        """Options of every runner; they override all others."""
        self._avoided: frozenset[str] = frozenset()
        """Titles of kernels that crashed, and must not run in this process."""

    def _tests(self) -> str:
        free_unused()  # The tests' process needs the memory.
        seconds = min(2 * TESTS, max(1.0, self._session.budget.left))
        checks, skipped = run_tests(self._avoided, self._session.children, seconds)
        self._findings.checks += checks
        self._findings.skipped |= skipped
        return "; ".join([f"{check.name} {Outcome(check.passed, check.detail)}" for check in checks] or ["all skipped"])

    def _fitting(self, shape: Shape) -> Shape | None:
        """The shape, or None, reported as skipped, if it does not fit into this GPU's memory."""
        if self._device.type != "cuda":
            return shape
        cache = self._options(max(self._scale.batches))["kv_cache_tokens"] * shape.kv_elements
        # Either while it is served or in the parity check, whichever needs more.
        needed = max(shape.weights + cache, 3 * shape.weights) * self._dtype.itemsize + SPARE_MEMORY
        total = torch.cuda.get_device_properties(self._device).total_memory
        if needed <= total:
            return shape
        self._session.skip(shape.name, f"needs {needed >> 30} GiB, and this GPU has {total >> 30}")
        return None

    def _options(self, batch: int) -> dict[str, Any]:
        tokens = self._scale.prompt + (ROUNDS + 2) * self._scale.steps + SPARE + READING
        return self._scale.options(batch, tokens, device=self._device.type)

    def _enter(self, title: str, shape: Shape, batch: int, **options: Any) -> Served | None:
        """Load a runner of this shape, which is freed when `self._runners` is closed. Returns None if that fails."""
        loaded: list[Served] = []

        def load() -> str:
            wanted = self._options(batch) | options | self._forced
            loaded.append(self._runners.enter_context(served(shape, self._session.folder, **wanted)))
            return ", ".join(f"{name} {value}" for name, value in loaded[0].runner.choices.items())

        seconds = AGAIN if shape.name in self._known else LOAD
        self._known.add(shape.name)
        self._do(f"{shape.name}, {title}", seconds, load, needed=True)
        return loaded[0] if loaded else None

    def _chosen(self, one: Served) -> None:
        self._findings.choices[one.shape.name] = dict(one.runner.choices)
        self._check(f"no fallback, {one.shape.name}", 0, check_choices, one)

    def _rates(self) -> str:
        self._findings.rates = found = rates(self._device, self._dtype, self._scale.copied, self._scale.side)
        return str(found)

    def _parity(self, one: Served) -> Outcome:
        return check_parity(one, self._device, self._scale.parity_lengths, self._scale.parity_steps)

    def _decode(self, one: Served, mode: str, batches: tuple[int, ...]) -> None:
        for batch in batches:
            name = f"generation, {one.shape.name}, {mode}, batch {batch}"
            sizes = (batch, self._scale.prompt, self._scale.steps)
            self._record(self._findings.decode, name, decode, one, mode, *sizes)

    def _joins(self, one: Served, mode: str, batches: tuple[int, ...]) -> None:
        for batch, tokens in product(batches, self._scale.joining):
            name = f"{tokens} tokens join, {one.shape.name}, {mode}, batch {batch}"
            self._record(self._findings.joins, name, join, one, mode, batch, self._scale.prompt, tokens)

    def _gaps(self, mode: str, *runners: Served) -> None:
        for batch, one in product(self._scale.few_batches, runners):
            title = "with" if one.runner.overlap else "without"
            name = f"gaps, {one.shape.name}, {mode}, batch {batch}, {title} overlap"
            sizes = (batch, self._scale.prompt, self._scale.steps)
            self._record(self._findings.gaps, name, gaps, one, mode, self._device, *sizes)

    def _side_by_side(self, one: Served) -> None:
        """Measures the prompt rate, and the workloads that the peers are measured with."""
        name, prompts = f"context, {one.shape.name}", self._scale.prompts
        self._record(self._findings.context, name, prompt_rate, one, *prompts)
        for work in self._scale.works:
            name = f"side by side, {one.shape.name}, batch {work.batch}: {SLUICE}"
            self._record(self._findings.throughput, name, throughput, one, work)

    def _quantized(self, shape: Shape) -> None:
        """The shape with quantized matrices, which are held as stored on a GPU."""
        for each in quantized(shape):
            with self._runners:
                self._few(each)

    def _few(self, shape: Shape) -> None:
        fast = self._enter(AS_SERVED, shape, max(self._scale.few_batches), overlap=True)
        if fast is not None:
            self._chosen(fast)
            self._decode(fast, AS_SERVED, self._scale.few_batches)
            self._record(self._findings.context, f"context, {shape.name}", prompt_rate, fast, *self._scale.prompts)

    def _files(self, small: Shape, large: Shape) -> None:
        """KV blocks in files. No other runner should be in memory."""
        requests, longest = self._scale.copies
        tokens = requests * 2 * longest
        sizes = self._scale.options(requests, 2 * longest) | self._file_options(small, tokens)

        def check() -> Outcome:
            with engines(small, self._session.folder, 2, **sizes) as load:
                return check_copies(load, requests, longest)

        self._check(f"blocks of other engines, {small.name}", 2 * LOOPS, check)
        self._do(f"copies to a file, {large.name}", 2 * LOAD + 2 * MEASURE, partial(self._copying, large))

    def _copying(self, shape: Shape) -> str:
        batch, prompt, steps = self._scale.copying
        tokens = prompt + BLOCK + (ROUNDS + 1) * steps + SPARE + READING
        sizes = self._scale.options(batch, tokens) | self._file_options(shape, batch * (tokens + 64))
        with engines(shape, self._session.folder, 1, **sizes) as load, load("a") as one:
            found = copying(one, batch, prompt, steps)
        self._findings.decode += found
        plain, copied = found
        return f"{copied}; {copied.tokens_per_second / plain.tokens_per_second:.1%} of the rate without"

    def _file_options(self, shape: Shape, tokens: int) -> dict[str, Any]:
        size = tokens * shape.kv_elements * self._dtype.itemsize
        # Small blocks, so that they fill evenly.
        return {"device": self._device.type, "kv_host_memory": size, "tokens_per_block": BLOCK} | self._forced

    def _peers(self, shape: Shape) -> None:
        installed = [kind for kind in PEERS.values() if find_spec(kind.package) is not None]
        for kind in PEERS.values():
            free_unused()  # The peer's process needs the memory.
            name = f"side by side, {shape.name}: {kind.name}"
            waiting = len(installed) - installed.index(kind) if kind in installed else 1
            self._do(name, ENOUGH, partial(self._peer, name, kind, shape, waiting))

    def _peer(self, name: str, kind: PeerKind, shape: Shape, waiting: int) -> str:
        """`waiting`: number of peers that share the remaining budget, including this one."""
        seconds = self._session.budget.left / waiting
        found, why = measure_peer(kind, shape, self._scale.works, self._device, self._session.children, seconds)
        self._findings.throughput += found
        if why:
            self._findings.skipped[name] = why
        return "; ".join([f"batch {one.batch}: {one}" for one in found] + ([f"incomplete: {why}"] if why else []))

    def _record(self, into: list[T], name: str, measure: Callable[..., T], *args: Any) -> None:
        def measured() -> str:
            into.append(measure(*args))
            return str(into[-1])

        self._do(name, MEASURE, measured)

    def _check(self, name: str, seconds: float, task: Callable[..., Outcome], *args: Any) -> None:
        """Run a check. Any exception except Skip counts as a failed check."""

        def checked() -> str:
            try:
                outcome = task(*args)
            except Skip:
                raise
            except Exception as error:
                self._findings.checks.append(Check(name, *Outcome.of_error(error)))
                raise
            self._findings.checks.append(Check(name, *outcome))
            return str(outcome)

        self._do(name, seconds, checked, needed=True)

    def _do(self, name: str, seconds: float, task: Callable[[], str], *, needed: bool = False) -> None:
        self._session.do(name, seconds * self._scale.pace, task, needed=needed)
