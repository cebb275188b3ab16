"""A shape with random weights in memory, and the engine's core around it, without a ring."""

import gc
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from bench.gpu.shapes import Shape
from bench.systems.direct import ATTEMPT, GREEDY, Inbox, submit
from engine_worker.core.engine import Engine
from engine_worker.core.refusals import EngineLimits, longest_sequence
from engine_worker.hooks import Hooks, Responses, Stop
from engine_worker.protocol import Runner
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from engine_worker.runner.weights import Progress
from engine_worker.step import Drawn
from sluice.checkpoint.folder import Checkpoint, open_checkpoint
from sluice.settings.engine import Batching
from sluice.wire.params import SamplingParams

SEED = 7

LoadRunner = Callable[[Checkpoint, RunnerConfig, Progress], Runner]


@dataclass(frozen=True, slots=True)
class Served:
    """A runner, and the bytes that its steps read."""

    shape: Shape
    checkpoint: Checkpoint
    config: RunnerConfig
    runner: Runner
    dtype: torch.dtype
    weight_bytes: int
    """Bytes of weights that a step of this rank with many sequences reads."""

    def step_bytes(self, batch: int) -> float:
        """Bytes of weights that a step of so many sequences reads: without experts that none of them chooses."""
        shape = self.shape
        if not shape.experts:
            return self.weight_bytes
        layers = (self.weight_bytes - shape.head * self.dtype.itemsize) / (shape.weights - shape.head - shape.embedding)
        return self.weight_bytes - layers * shape.experts * shape.idle_share(batch)

    @property
    def token_bytes(self) -> int:
        return self.shape.kv_elements * self.dtype.itemsize


@contextmanager
def served(shape: Shape, folder: Path, load: LoadRunner = load_runner, **options: Any) -> Iterator[Served]:
    """Load a shape with these options of RunnerConfig. Its memory is freed afterwards."""
    free_unused()
    checkpoint = open_checkpoint(str(shape.write(folder)))
    config = RunnerConfig(weights="random", weights_seed=SEED, **options)
    sizes = [0]
    runner = load(checkpoint, config, lambda _, total: sizes.append(total))
    dtype = getattr(torch, runner.choices["dtype"])
    try:
        weight_bytes = sizes[-1] - shape.embedding * dtype.itemsize
        yield Served(shape, checkpoint, config, runner, dtype, weight_bytes)
    finally:
        # Otherwise this frame would still refer to the runner while memory is freed.
        del runner
        free_unused()


def free_unused() -> None:
    # `freeze_heap` hid the former runner's objects, some of which form cycles.
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class StepWindow(NamedTuple):
    steps: int
    seconds: float
    tokens: int
    context: int
    """Tokens in the KV cache, summed over sequences and steps."""


class StderrLog:
    """The core's log on standard error: structlog may be missing."""

    def __getattr__(self, level: str) -> Any:
        def write(event: str, **values: Any) -> None:
            print(f"engine, {level}: {event} {values or ''}", file=sys.stderr)
            if level == "exception":
                traceback.print_exc()

        return write


class Core:
    """Submits requests, runs steps, and keeps the sampled tokens."""

    def __init__(self, served: Served, sampling: SamplingParams = GREEDY) -> None:
        config, checkpoint, self._inbox = served.config, served.checkpoint, Inbox()
        batching = Batching(config.max_batch_size, config.max_tokens_per_step)
        longest = longest_sequence(served.runner, batching, checkpoint.max_context_tokens)
        limits = EngineLimits(checkpoint.fingerprint, checkpoint.vocab_size, longest, config.max_batch_size)
        hooks = Hooks(self._inbox.get_requests, self._on_responses, self._inbox.get_stops, lambda _: None)
        self._engine = Engine(served.runner, limits, batching, hooks, time.monotonic, cast(Any, StderrLog()))
        self._sampling = sampling
        self._prompt_tokens: list[int] = []
        self._live: set[int] = set()
        self._ticks = self._drawn = self._context = 0
        self.drawn: list[list[Drawn]] = []
        """Sampled tokens of each request."""

    @property
    def copied(self) -> tuple[int, int]:
        """Blocks of other engines: copied from them, and taken over."""
        cache = self._engine.cache
        return 0 if cache.fetches is None else cache.fetches.fetched, cache.tiers.adopted

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        number = len(self.drawn)
        self._inbox.submits.append(submit(number, prompt, max_tokens, self._sampling))
        self._prompt_tokens.append(len(prompt))
        self.drawn.append([])
        self._live.add(number)

    def settle(self) -> None:
        """Runs until all live requests generate, and a few steps longer."""
        while any(not self.drawn[number] for number in self._live):
            self._step()
        self.advance(4)

    def advance(self, steps: int) -> StepWindow:
        """Runs this many steps, counting only those that sampled a token."""
        end, drawn, context = self._ticks + steps, self._drawn, self._context
        began = time.perf_counter()
        while self._ticks < end:
            self._step()
        seconds = time.perf_counter() - began
        return StepWindow(steps, seconds, self._drawn - drawn, self._context - context)

    def finish(self) -> None:
        """Runs until every request has ended."""
        while self._live:
            self._step()
        while self._engine.step():
            pass  # Steps that were launched ahead.

    def stop(self) -> None:
        self._inbox.stops += [Stop(number, ATTEMPT) for number in self._live]
        self.finish()

    def _step(self) -> None:
        if not self._engine.step() and self._live and not (self._inbox.submits or self._engine.intake.preparing):
            raise RuntimeError(f"the engine has nothing to do, but {len(self._live)} requests have not ended")

    def _on_responses(self, responses: Responses) -> None:
        for _, fault in responses.refused:
            raise RuntimeError(f"the engine refused: {fault.message}")
        drawn = 0
        for row in responses.rows:
            if row.end is not None:
                self._live.discard(row.request)
                if row.end.fault is not None:
                    raise RuntimeError(f"the engine failed: {row.end.fault.message}")
            mine = self.drawn[row.request]
            mine += map(Drawn, row.tokens, row.logprobs or repeat(None))
            drawn += len(row.tokens)
            self._context += self._prompt_tokens[row.request] + len(mine)
        self._drawn += drawn
        self._ticks += bool(drawn)


def random_prompts(count: int, tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)]
