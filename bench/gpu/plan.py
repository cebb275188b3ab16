"""All tasks in order: does it run, is it right, is it fast."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.gpu import default, times
from bench.gpu.checks import ranks
from bench.gpu.checks.engine import check_graphs, check_overlap
from bench.gpu.engine import Served, served
from bench.gpu.findings import RUNS, Check
from bench.gpu.machine import facts
from bench.gpu.measures import AS_SERVED, EAGER
from bench.gpu.scale import Scale
from bench.gpu.session import GpuSession
from bench.gpu.shapes import Shape
from bench.gpu.stages import Stages
from bench.gpu.trials import avoiding, places, subjects, try_in_child
from engine_worker.runner.fusing import missing_compiler

Recheck = Callable[[Mapping[str, Any]], Check]

WITHOUT: Mapping[str, Mapping[str, Any]] = {
    "CUDA graphs": {"cuda_graphs": False},
    "overlap": {"overlap": False},
    "fused kernels": {"fused_kernels": False},
    "an attention kernel": {"attention": "reference"},
    "all of these": {"cuda_graphs": False, "overlap": False, "fused_kernels": False, "attention": "reference"},
}


def blame(recheck: Recheck) -> tuple[str, list[str]]:
    """The layer at fault, if found, and the outcome of each trial."""
    told, holds = [], []
    for layer, options in WITHOUT.items():
        try:
            check = recheck(options)
        except Exception as error:  # noqa: BLE001 - the other layers must still be tried
            told.append(f"without {layer}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        told.append(f"without {layer}: {'holds' if check.passed else 'does not hold'}: {check.detail}")
        if check.passed:
            holds.append(layer)
    return _verdict(holds), told


def _verdict(holds: list[str]) -> str:
    alone = [layer for layer in holds if layer != "all of these"]
    if len(alone) == 1:
        return alone[0]
    if alone:
        return f"one of {', '.join(alone)}; it holds without any one of them"
    return "more than one layer" if holds else "something else: it does not hold without any of them"


TRIAL, DEFAULT = 20.0, 45.0
"""Estimated seconds of a kernel's trials, and of loading and using the default path."""
TRIAL_LIMIT = 60.0
NO_COMPILER = "**Triton cannot compile here: the speeds of this run mean nothing.**"


class Plan(Stages):
    def __init__(self, session: GpuSession, scale: Scale, *, new: bool) -> None:
        """`new`: on an unknown machine first try what may not run at all, and search for the layer at fault."""
        super().__init__(session, scale)
        self._new = new
        self._avoided: frozenset[str] = frozenset()

    def run(self) -> None:
        small, large = self._scale.small, self._scale.large
        if self._new:
            self._start(small)
        self._measure("copy and matrix product", times.RATES, self._rates)
        with ExitStack() as stack:
            self._goals(stack, small)
        if large is not None:
            large = self._fitting(large)
        if large is not None:
            self._alone(large)
            self._large(large)
        self._kernels(self._avoided)
        self._check(ranks.title(small.name), times.RANKS, self._ranks)
        with ExitStack() as stack:
            self._rest(stack, small)
        self._peers(large or small)

    def _start(self, shape: Shape) -> None:
        self._measure("the machine", 0, self._facts)
        for title in subjects():
            self._session.do(title, TRIAL * self._scale.pace, partial(self._try, title), needed=True)
        self._avoid()
        self._default(shape)

    def _facts(self) -> str:
        self._findings.facts = facts(self._device)
        if missing_compiler():
            self._findings.notes.append(NO_COMPILER)
        return "; ".join(f"{name}: {value}" for name, value in self._findings.facts.items())

    def _try(self, title: str) -> str:
        session = self._session
        seconds = min(TRIAL_LIMIT, max(1.0, session.budget.left))
        given = places(self._scale, self._dtype, self._device)
        found = try_in_child(title, given, session.children, session.folder / "trial.log", seconds)
        self._findings.tried += found
        ended = {one.ended for one in found}
        slowest = max((one.first for one in found), default=0.0)
        return f"runs on {len(found)} kinds of heads, {slowest:.1f} s at first" if ended == {RUNS} else "; ".join(ended)

    def _avoid(self) -> None:
        """Disable crashed kernels: from here on kernels run in this process."""
        self._forced = avoiding(self._findings.tried)
        self._avoided = frozenset(one.kernel for one in self._findings.tried if one.crashed)
        if self._forced:
            said = ", ".join(f"{name} = {value}" for name, value in self._forced.items())
            self._findings.notes.append(f"**A kernel crashed its process; everything else ran with {said}.**")
            self._session.say(self._findings.notes[-1])

    def _default(self, shape: Shape) -> None:
        def load() -> str:
            opened = default.loaded(
                shape, self._session.folder, self._device, self._findings.memory.append, **self._forced
            )
            with opened as found:
                self._findings.choices["default path"] = dict(found.runner.choices)
                told = [f"{kind}: {self._serve(found, kind)}" for kind in default.KINDS]
            return f"{found.runner.num_blocks} blocks of {found.runner.tokens_per_block}; {'; '.join(told)}"

        self._session.do("default path", DEFAULT * self._scale.pace, load, needed=True)
        self._known.add(shape.name)

    def _serve(self, found: Served, kind: str) -> str:
        told = default.serve(found, kind, *self._scale.peer_work)
        self._findings.memory.append(default.memory(f"{default.REQUESTS} {kind}", self._device))
        return told

    def _goals(self, stack: ExitStack, shape: Shape) -> None:
        batch, few = max(self._scale.batches), max(*self._scale.gap_batches, *self._scale.graph_sizes)
        fast = self._enter(stack, AS_SERVED, shape, batch, overlap=True)
        if fast is None:
            return
        self._chosen(fast)
        self._blaming(
            f"greedy = transformers, {shape.name}",
            times.PARITY,
            partial(self._parity, fast),
            partial(self._again, shape, self._parity),
        )
        self._decode(fast, AS_SERVED, (1,))
        eager = self._enter(stack, EAGER, shape, few, overlap=True, cuda_graphs=False)
        if eager is not None:
            self._decode(eager, EAGER, (1,))
            check = partial(check_graphs, fast, eager, self._scale.graph_sizes, self._scale.requests[1])
            again = partial(self._again, shape, self._parity)
            self._blaming(f"graphs = eager, {shape.name}", times.LOOPS, check, again)
        plain = self._enter(stack, "no overlap", shape, few, overlap=False)
        if plain is not None:
            self._gaps(AS_SERVED, fast, plain)
            check = partial(check_overlap, fast, plain, *self._scale.requests)
            again = partial(self._again, shape, lambda one: check_overlap(one, plain, *self._scale.requests))
            self._blaming(f"overlap = none, {shape.name}", times.LOOPS, check, again)

    def _rest(self, stack: ExitStack, shape: Shape) -> None:
        fast = self._enter(stack, f"{AS_SERVED}, again", shape, max(self._scale.batches), overlap=True)
        if fast is None:
            return
        self._decode(fast, AS_SERVED, tuple(batch for batch in self._scale.batches if batch > 1))
        self._sampled(fast)

    def _blaming(
        self, name: str, seconds: float, task: Callable[[], Check], again: Callable[[Mapping[str, Any]], Check]
    ) -> None:
        """A check; if it fails on a new machine, find the layer at fault."""
        self._check(name, seconds, task)
        if not self._new or all(check.passed for check in self._findings.checks if check.name == name):
            return

        def search() -> str:
            found, told = blame(again)
            self._findings.blamed[name] = "; ".join([found, *told])
            return f"at fault: {found}"

        self._session.do(f"{name}: what is at fault", times.AGAIN * self._scale.pace, search)

    def _again(self, shape: Shape, check: Callable[[Served], Check], options: Mapping[str, Any]) -> Check:
        few = len(self._scale.parity_lengths)
        wanted = self._options(max(few, max(self._scale.graph_sizes))) | {"device": self._device.type, "overlap": True}
        with served(shape, self._session.folder, **(wanted | self._forced | dict(options))) as one:
            return check(one)
