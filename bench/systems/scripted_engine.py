"""The engine's core around a runner without a model."""

import time
from typing import NamedTuple

import structlog

from engine_worker.core.assembly import assemble
from engine_worker.core.intake import Terms
from engine_worker.hooks import Hooks
from engine_worker.step import Drawn, Step
from sluice.ring.params import SamplingParams, StopParams, TextParams
from sluice.ring.wire import Submit
from sluice.settings.engine import Batching

TOKENS_PER_BLOCK = 16
PROMPT_TOKENS = 64
SETTLING_STEPS = 20


class ScriptedRunner:
    """Draws the same token for everybody, and notes when it was called and when it returned."""

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
        """Of the last step."""
        self._drawn = Drawn(1)

    def launch(self, step: Step) -> "Done":
        """See `Runner.launch`."""
        self.called = time.thread_time()
        self.slices = len(step.slices)
        drawn = [self._drawn] * sum(len(part.draws) for part in step.slices)
        self.returned = time.thread_time()
        return Done(drawn)

    def check(self) -> None:
        """See `Runner.check`: there is no device."""


class Done(NamedTuple):
    """A step that was computed at once."""

    drawn: list[Drawn]

    def collect(self) -> list[Drawn]:
        """See `Launched.collect`."""
        return self.drawn


class Load(NamedTuple):
    """So many sequences generate while so many requests wait for a place."""

    policy: str
    running: int
    waiting: int
    samples: int
    """Steps to time."""


class ScriptedEngine:
    """An engine under a load. Raises RuntimeError if it does not come to that."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._taken = 0.0
        max_tokens = SETTLING_STEPS + load.samples + TOKENS_PER_BLOCK
        self._requests = [_submit(number, max_tokens) for number in range(load.running + load.waiting)]
        blocks = load.running * -(-(PROMPT_TOKENS + max_tokens) // TOKENS_PER_BLOCK)
        self._runner = ScriptedRunner(2 * blocks + TOKENS_PER_BLOCK)
        self._engine = assemble(
            self._runner,
            Terms("", 1 << 20, PROMPT_TOKENS + max_tokens, len(self._requests)),
            Batching(
                load.running,
                max(load.running * PROMPT_TOKENS, PROMPT_TOKENS),
                capacity_scheduler_policy=load.policy,
            ),
            Hooks(self._get_requests, lambda _: None, lambda: (), lambda _: None),
            time.monotonic,
            structlog.get_logger(),
        )

    def timed_steps(self) -> list[tuple[float, float]]:
        """For each step, seconds of scheduling and of all but the runner."""
        for _ in range(SETTLING_STEPS):
            self._engine.step()
        return [self._timed_step() for _ in range(self._load.samples)]

    def _timed_step(self) -> tuple[float, float]:
        began = time.thread_time()
        self._engine.step()
        ended, runner = time.thread_time(), self._runner
        if runner.slices != self._load.running:
            raise RuntimeError(f"{runner.slices} sequences ran where {self._load.running} should")
        return runner.called - self._taken, ended - began - (runner.returned - runner.called)

    def _get_requests(self, limit: int) -> list[Submit]:
        self._taken = time.thread_time()
        taken, self._requests = self._requests[:limit], self._requests[limit:]
        return taken


def _submit(number: int, max_tokens: int) -> Submit:
    """No two prompts begin alike."""
    return Submit(
        request=number,
        attempt=0,
        engine_epoch=0,
        name=str(number),
        prompt=list(range(number * PROMPT_TOKENS, (number + 1) * PROMPT_TOKENS)),
        n=1,
        sampling=SamplingParams(),
        stopping=StopParams(max_tokens=max_tokens),
        text=TextParams(),
        priority=2,
        salt="",
        time_limit=None,
        detokenizer="",
        router="",
    )
