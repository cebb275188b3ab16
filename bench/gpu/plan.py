"""All tasks in order: first whether the engine runs, then whether it is correct, then how fast it is."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.gpu.checks import check_graphs, check_overlap
from bench.gpu.engine import Served, served
from bench.gpu.findings import RUNS, Outcome
from bench.gpu.machine import facts
from bench.gpu.measures import AS_SERVED, EAGER, FLAT, FREE, PEAKED, SAMPLING, default_path, memory, serve
from bench.gpu.scale import AGAIN, DEFAULT, LOOPS, PARITY, RATES, TESTS, TRIAL, Scale
from bench.gpu.session import GpuSession
from bench.gpu.shapes import Shape, Workload
from bench.gpu.stages import Stages
from bench.gpu.trials import avoiding, places, subjects, try_in_child
from bench.systems.direct import GREEDY
from engine_worker.runner.fusing import missing_compiler
from sluice.wire.params import SamplingParams

Recheck = Callable[[Served], Outcome]
"""Repeats a check with a different runner."""

WITHOUT: Mapping[str, dict[str, Any]] = {
    "CUDA graphs": {"cuda_graphs": False},
    "overlap": {"overlap": False},
    "fused kernels": {"fused_kernels": False},
    "an attention kernel": {"attention": "reference"},
    "all of these": {"cuda_graphs": False, "overlap": False, "fused_kernels": False, "attention": "reference"},
}


def blame(recheck: Callable[[dict[str, Any]], Outcome]) -> tuple[str, list[str]]:
    """Finds the layer at fault. Returns the verdict and the outcome of each trial."""
    trials, holds = [], []
    for layer, options in WITHOUT.items():
        try:
            outcome = recheck(options)
        except Exception as error:  # noqa: BLE001 - the other layers must still be tried
            outcome = Outcome.of_error(error)
        trials.append(f"without {layer}: {outcome}")
        if outcome.passed:
            holds.append(layer)
    return _verdict(holds), trials


def _verdict(holds: list[str]) -> str:
    alone = [layer for layer in holds if layer != "all of these"]
    if len(alone) == 1:
        return alone[0]
    if alone:
        return f"one of {', '.join(alone)}; the check passes without any one of them"
    return "more than one layer" if holds else "something else: the check fails without any of them"


TRIAL_LIMIT = 60.0
REQUESTS = 64
KINDS: Mapping[str, SamplingParams] = {"greedy": GREEDY, "top-p": SAMPLING[PEAKED]}
"""Kinds of requests through the default path."""
NO_COMPILER = "**Triton has no compiler on this machine: the speeds of this run mean nothing.**"


class Plan(Stages):
    def __init__(self, session: GpuSession, scale: Scale, *, new: bool) -> None:
        """`new` is for an unknown machine: first tries the kernels, and searches for the layer at fault of a failed
        check."""
        super().__init__(session, scale)
        self._new = new

    def run(self) -> None:
        small, large = self._scale.small, self._scale.large
        if self._new:
            self._start(small)
        self._do("copy and matrix product", RATES, self._rates)
        with self._runners:
            self._goals(small)
        # The small runners have been freed, because the large runner and its cache need the memory.
        if large is not None:
            large = self._fitting(large)
        if large is not None:
            with self._runners:
                self._alone(large)
            with self._runners:
                self._large(large)
        self._files(small, large or small)
        self._do("tests", TESTS, self._tests, needed=True)
        with self._runners:
            self._rest(small)
        if large is not None:
            self._quantized(large)
        self._peers(large or small)

    def files(self) -> None:
        """Only what is about KV blocks in files."""
        small, large = self._scale.small, self._scale.large
        self._files(small, (large and self._fitting(large)) or small)

    def quantized(self) -> None:
        """Only what is about quantized matrices, also of experts, and the same shapes without them."""
        self._do("copy and matrix product", RATES, self._rates)
        dense = (self._scale.large and self._fitting(self._scale.large)) or self._scale.small
        for shape in filter(None, (dense, self._fitting(self._scale.sparse))):
            with self._runners:
                self._few(shape)
            self._quantized(shape)

    def _start(self, shape: Shape) -> None:
        self._do("the machine", 0, self._facts)
        for title in subjects():
            self._do(title, TRIAL, partial(self._try, title), needed=True)
        # Must precede all kernels in this process, which a crashing kernel would end.
        self._avoid()
        self._do("default path", DEFAULT, partial(self._default, shape), needed=True)
        self._known.add(shape.name)

    def _facts(self) -> str:
        self._findings.facts = facts(self._device)
        if missing_compiler():
            self._findings.notes.append(NO_COMPILER)
        return "; ".join(f"{name}: {value}" for name, value in self._findings.facts.items())

    def _try(self, title: str) -> str:
        seconds = min(TRIAL_LIMIT, max(1.0, self._session.budget.left))
        found = try_in_child(title, places(self._scale, self._dtype, self._device), self._session.children, seconds)
        self._findings.tried += found
        ended = {one.ended for one in found}
        slowest = max((one.first for one in found), default=0.0)
        return f"runs on {len(found)} kinds of heads, {slowest:.1f} s at first" if ended == {RUNS} else "; ".join(ended)

    def _avoid(self) -> None:
        """Disables the kernels that crashed."""
        self._forced = avoiding(self._findings.tried)
        self._avoided = frozenset(one.kernel for one in self._findings.tried if one.crashed)
        if self._forced:
            forced = ", ".join(f"{name} = {value}" for name, value in self._forced.items())
            self._findings.notes.append(f"**A kernel crashed its process; everything else ran with {forced}.**")
            self._session.say(self._findings.notes[-1])

    def _default(self, shape: Shape) -> str:
        record, work = self._findings.memory.append, Workload(REQUESTS, *self._scale.peer_work)
        with default_path(shape, self._session.folder, self._device, record, **self._forced) as found:
            self._findings.choices["default path"] = dict(found.runner.choices)
            parts = [f"{found.runner.num_blocks} blocks of {found.runner.tokens_per_block}"]
            for kind, sampling in KINDS.items():
                seconds = serve(found, work, len(parts), sampling)
                parts.append(f"{kind}: {REQUESTS} requests, {work.tokens / seconds:,.0f} tokens/s")
                record(memory(f"{REQUESTS} {kind}", self._device))
        return "; ".join(parts)

    def _goals(self, shape: Shape) -> None:
        scale, batch = self._scale, max(self._scale.batches)
        few = max(*scale.few_batches, *scale.graph_sizes)
        fast = self._enter(AS_SERVED, shape, batch, overlap=True)
        if fast is None:
            return
        self._chosen(fast)
        self._blaming("greedy = transformers", PARITY, partial(self._parity, fast), self._parity)
        self._decode(fast, AS_SERVED, (1,))
        self._joins(fast, AS_SERVED, scale.few_batches)
        eager = self._enter(EAGER, shape, few, overlap=True, cuda_graphs=False)
        if eager is not None:
            self._decode(eager, EAGER, (1,))
            self._joins(eager, EAGER, (1,))
            check = partial(check_graphs, fast, eager, scale.graph_sizes, scale.requests[1])
            self._blaming("graphs = eager", LOOPS, check, self._parity)
        plain = self._enter("no overlap", shape, few, overlap=False)
        if plain is not None:
            self._gaps(AS_SERVED, fast, plain)
            self._blaming(
                "overlap = none",
                LOOPS,
                lambda: check_overlap(fast, plain, *scale.requests),
                lambda one: check_overlap(one, plain, *scale.requests),
            )

    def _alone(self, shape: Shape) -> None:
        """Parity with no other runner in memory: transformers in float32 takes twice the memory of the weights."""
        few = len(self._scale.parity_lengths)
        one = self._enter("parity", shape, few, cuda_graphs=False, kv_cache_tokens=4096)
        if one is not None:
            self._check(f"greedy = transformers, {shape.name}", PARITY, self._parity, one)

    def _large(self, shape: Shape) -> None:
        fast = self._enter(AS_SERVED, shape, max(self._scale.batches), overlap=True)
        if fast is not None:
            self._chosen(fast)
            self._decode(fast, AS_SERVED, self._scale.batches)
            self._joins(fast, AS_SERVED, self._scale.few_batches)
            self._side_by_side(fast)
            self._gaps(AS_SERVED, fast)
            for mode in (FREE, PEAKED):
                self._decode(fast, mode, self._scale.few_batches[-1:])

    def _rest(self, shape: Shape) -> None:
        fast = self._enter(f"{AS_SERVED}, again", shape, max(self._scale.batches), overlap=True)
        if fast is not None:
            self._decode(fast, AS_SERVED, tuple(batch for batch in self._scale.batches if batch > 1))
            for mode in (FREE, PEAKED, FLAT):
                self._decode(fast, mode, self._scale.sampled_batches)
            self._gaps(PEAKED, fast)
            if self._scale.large is None:
                self._side_by_side(fast)

    def _blaming(self, title: str, seconds: float, task: Callable[[], Outcome], recheck: Recheck) -> None:
        """Runs a check of the small shape. If it fails on a new machine, finds the layer at fault by `recheck`."""
        name = f"{title}, {self._scale.small.name}"
        self._check(name, seconds, task)
        if not self._new or all(check.passed for check in self._findings.checks if check.name == name):
            return

        def search() -> str:
            found, trials = blame(partial(self._again, recheck))
            self._findings.blamed[name] = "; ".join([found, *trials])
            return f"at fault: {found}"

        self._do(f"{name}: search for the layer at fault", AGAIN, search)

    def _again(self, recheck: Recheck, options: dict[str, Any]) -> Outcome:
        few = max(len(self._scale.parity_lengths), *self._scale.graph_sizes)
        wanted = self._options(few) | {"overlap": True} | self._forced | options
        with served(self._scale.small, self._session.folder, **wanted) as one:
            return recheck(one)
