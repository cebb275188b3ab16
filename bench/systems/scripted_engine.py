"""The engine's core around a runner without a model, to time everything but the model."""

import time
from typing import NamedTuple

import structlog

from bench.systems.submits import submit
from engine_worker.core.engine import Engine
from engine_worker.core.intake import Terms
from engine_worker.hooks import Hooks
from engine_worker.step import Drawn, Step
from sluice.ring.wire import Submit
from sluice.settings.engine import Batching

TOKENS_PER_BLOCK = 16
PROMPT_TOKENS = 64
SETTLING_STEPS = 20


class ScriptedRunner:
    """Draws the same token for every sequence, and records when it was called and when it returned."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = 0
        self.tokens_per_block = TOKENS_PER_BLOCK
        self.window: int | None = None
        self.dtype = "none"
        self.choices = {"device": "none"}
        self.overlap = False
        self.called = 0.0
        self.returned = 0.0
        self.slices = 0
        self._drawn = Drawn(1)

    def launch(self, step: Step) -> "Done":
        self.called = time.thread_time()
        self.slices = len(step.slices)
        drawn = [self._drawn] * sum(len(part.draws) for part in step.slices)
        self.returned = time.thread_time()
        return Done(drawn)

    def check(self) -> None:
        """There is no device."""


class Done(NamedTuple):
    drawn: list[Drawn]

    def collect(self) -> list[Drawn]:
        return self.drawn


class ScriptedEngine:
    """Sequences that generate while others wait for a slot. Raises RuntimeError if a step runs more or fewer."""

    def __init__(self, policy: str, running: int, waiting: int, samples: int) -> None:
        self._running = running
        self._samples = samples
        self._taken = 0.0
        max_tokens = SETTLING_STEPS + samples + TOKENS_PER_BLOCK
        self._requests = [submit(number, _prompt(number), max_tokens) for number in range(running + waiting)]
        blocks = running * -(-(PROMPT_TOKENS + max_tokens) // TOKENS_PER_BLOCK)
        self._runner = ScriptedRunner(2 * blocks + TOKENS_PER_BLOCK)
        self._engine = Engine(
            self._runner,
            Terms("", 1 << 20, PROMPT_TOKENS + max_tokens, len(self._requests)),
            Batching(
                running,
                max(running * PROMPT_TOKENS, PROMPT_TOKENS),
                capacity_scheduler_policy=policy,
            ),
            Hooks(self._get_requests, lambda _: None, lambda: (), lambda _: None),
            time.monotonic,
            structlog.get_logger(),
        )

    def timed_steps(self) -> list[tuple[float, float]]:
        """For each step, CPU seconds of scheduling, and of everything but the runner."""
        for _ in range(SETTLING_STEPS):
            self._engine.step()
        return [self._timed_step() for _ in range(self._samples)]

    def _timed_step(self) -> tuple[float, float]:
        # CPU time of this thread: other processes on the machine must not count.
        began = time.thread_time()
        self._engine.step()
        ended, runner = time.thread_time(), self._runner
        if runner.slices != self._running:
            raise RuntimeError(f"{runner.slices} sequences ran where {self._running} should")
        return runner.called - self._taken, ended - began - (runner.returned - runner.called)

    def _get_requests(self, limit: int) -> list[Submit]:
        self._taken = time.thread_time()
        taken, self._requests = self._requests[:limit], self._requests[limit:]
        return taken


def _prompt(number: int) -> list[int]:
    return list(range(number * PROMPT_TOKENS, (number + 1) * PROMPT_TOKENS))
