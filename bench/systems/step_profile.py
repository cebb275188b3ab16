"""The engine alone, with a timer around each part of a step.

python -m bench.systems.step_profile [the engine's own flags, such as --model]
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from bench.harness.children import serve_questions
from bench.harness.load import Load
from bench.systems.engine_alone import EngineAlone
from engine_worker.layers.linear import Linear, SummedLinear
from sluice.settings.read import load_settings
from sluice.settings.services import EngineSettings

PRODUCTS, ATTENTION, OTHERS = "matrix products", "attention", "other kernels"
INPUTS, SAMPLING, ENGINE = "inputs", "sampling", "scheduling, commit, rows"
PARTS = (PRODUCTS, ATTENTION, OTHERS, INPUTS, SAMPLING, ENGINE)
OPENVINO_NODES = {
    "FullyConnected": PRODUCTS,
    "FullyConnectedCompressed": PRODUCTS,
    "PagedAttentionExtension": ATTENTION,
}


class StepTimes(msgspec.Struct, frozen=True):
    """Milliseconds of each step by part, in the order of the steps. Times of kernels are accurate only as means over
    many steps."""

    steps: list[dict[str, float]]


class Stopwatch:
    """Measures nested parts: the time of a part excludes the parts within it."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self._within = 0.0
        """Seconds of parts inside the current one."""

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            outer, self._within = self._within, 0.0
            began = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                spent = time.perf_counter() - began
                self.parts[part] += spent - self._within
                self._within = outer + spent

        return timed

    def wrap(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self.around(part, getattr(owner, name)))

    def split(self, part: str, shares: dict[str, float]) -> None:
        """Moves time of `part` since the last `read` to other parts; `shares` are seconds measured within it."""
        for name, seconds in shares.items():
            self.parts[name] += seconds
            self.parts[part] -= seconds

    def read(self) -> dict[str, float]:
        found, self.parts = {part: 1000 * seconds for part, seconds in self.parts.items()}, defaultdict(float)
        return found


class StepProfile:
    def __init__(self, settings: EngineSettings) -> None:
        if settings.backend != "torch":
            _enable_openvino_profiling()
        self._alone = alone = EngineAlone(settings)
        self._watch = watch = Stopwatch()
        self._times: list[dict[str, float]] = []
        runner: Any = alone._runner
        forward = runner._forward
        for name, part in (("arrays", INPUTS), ("prepare", INPUTS), ("logits", OTHERS)):
            watch.wrap(forward, name, part)
        self._request: Any = getattr(forward, "_request", None)
        self._calls = 0
        """OpenVINO's request, whose nodes are profiled. None with torch."""
        self._by_node: dict[str, float] = defaultdict(float)
        """Seconds in OpenVINO's nodes so far, by part."""
        if self._request is None:
            for layer in (Linear, SummedLinear):
                watch.wrap(layer, "__call__", PRODUCTS)
            watch.wrap(forward.model, "logits", PRODUCTS)
            watch.wrap(forward.backend, "attend", ATTENTION)
        watch.wrap(runner, "launch", SAMPLING)
        engine = alone._engine
        self._step = watch.around(ENGINE, engine.step)
        engine.step = self._timed_step  # type: ignore[method-assign]

    def answer(self, load: Load) -> StepTimes:
        self._watch.read()
        self._times.clear()
        self._alone.answer(load)
        return StepTimes(self._times)

    def _timed_step(self) -> bool:
        busy: bool = self._step()
        if busy and self._request is not None:
            self._watch.split(OTHERS, self._node_times())
        found = self._watch.read()
        if busy:
            self._times.append(found)
        return busy

    def _node_times(self) -> dict[str, float]:
        """Seconds of OpenVINO's latest call by part. OpenVINO reports means over all its calls."""
        self._calls += 1
        before, self._by_node = self._by_node, defaultdict(float)
        for node in self._request.get_profiling_info():
            part = OPENVINO_NODES.get(node.node_type)
            if part is not None:
                self._by_node[part] += self._calls * node.real_time.total_seconds()
        return {part: seconds - before[part] for part, seconds in self._by_node.items()}


def _enable_openvino_profiling() -> None:
    from engine_worker.openvino.compiled import _core

    _core().set_property("CPU", {"PERF_COUNT": True})


if __name__ == "__main__":
    serve_questions(Load, StepProfile(load_settings(EngineSettings)).answer)
