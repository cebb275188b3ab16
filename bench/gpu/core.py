"""The engine's core around a runner: requests in, ticks of its loop out; no ring."""

import gc
import random
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple, cast

from bench.gpu.served import Served
from engine_worker.core.assembly import assemble, longest_sequence
from engine_worker.core.intake import Terms
from engine_worker.hooks import Hooks, Report, Responses, Stop
from engine_worker.step import Drawn
from sluice.ring.params import SamplingParams, StopParams, TextParams
from sluice.ring.wire import Submit
from sluice.settings.engine import Batching

HERE = "inproc://here"
GREEDY = SamplingParams(temperature=0.0)


class Ask(NamedTuple):
    """A request; it goes on past any end of sequence."""

    prompt: list[int]
    max_tokens: int


class Window(NamedTuple):
    """Some steps on end."""

    steps: int
    seconds: float
    tokens: int
    """Drawn."""
    context: int
    """Tokens that the steps' sequences had in the KV cache, summed over sequences and steps."""


class Log:
    """What the core says goes to standard error."""

    def __getattr__(self, level: str) -> Any:
        def say(event: str, **values: Any) -> None:
            print(f"engine, {level}: {event} {values or ''}", file=sys.stderr)
            if level == "exception":
                traceback.print_exc()

        return say


class Core:
    """Takes requests, turns as often as it is told, and keeps what came."""

    def __init__(self, served: Served, sampling: SamplingParams = GREEDY) -> None:
        """`sampling`: of all requests."""
        config, checkpoint = served.config, served.checkpoint
        batching = Batching(config.max_batch_size, config.max_tokens_per_step)
        longest = longest_sequence(served.runner, batching, checkpoint.max_context_tokens)
        terms = Terms(checkpoint.fingerprint, checkpoint.vocab_size, longest, config.max_batch_size)
        hooks = Hooks(self._get_requests, self._take, self._poll_stops, self._report)
        self._engine = assemble(served.runner, terms, batching, hooks, time.monotonic, cast(Any, Log()))
        self._sampling = sampling
        self._inbox: list[Submit] = []
        self._stops: list[Stop] = []
        self._prompts: dict[int, int] = {}
        self._live: set[int] = set()
        self._number = 0
        self._ticks = self._drawn = self._context = 0
        self.drawn: dict[int, list[Drawn]] = {}
        """What came of each request, by its number."""

    def submit(self, asks: Sequence[Ask]) -> range:
        """Hand in; returns their numbers."""
        numbers = range(self._number, self._number + len(asks))
        self._number = numbers.stop
        for number, ask in zip(numbers, asks, strict=True):
            self._inbox.append(_submit(number, ask, self._sampling))
            self._prompts[number] = len(ask.prompt)
            self.drawn[number] = []
        self._live.update(numbers)
        return numbers

    def settle(self) -> None:
        """Until all that live generate, and some steps longer."""
        while any(not self.drawn[number] for number in self._live):
            self._turn()
        self.advance(4)

    def advance(self, steps: int) -> Window:
        """So many steps that drew something."""
        end, drawn, context = self._ticks + steps, self._drawn, self._context
        began = time.perf_counter()
        while self._ticks < end:
            self._turn()
        seconds = time.perf_counter() - began
        return Window(steps, seconds, self._drawn - drawn, self._context - context)

    def finish(self) -> float:
        """Until nothing lives; seconds."""
        began = time.perf_counter()
        while self._live:
            self._turn()
        seconds = time.perf_counter() - began
        self._rest()
        return seconds

    def stop(self) -> None:
        """End what lives."""
        self._stops += [Stop(number, 0) for number in self._live]
        self.finish()

    def _rest(self) -> None:
        """Steps that were begun ahead are through."""
        while self._engine.step():
            pass

    def _turn(self) -> None:
        if not self._engine.step() and self._live and not self._inbox:
            raise RuntimeError(f"the engine has nothing to do, and {len(self._live)} requests live")

    def _get_requests(self, limit: int) -> list[Submit]:
        taken, self._inbox = self._inbox[:limit], self._inbox[limit:]
        return taken

    def _poll_stops(self) -> list[Stop]:
        taken, self._stops = self._stops, []
        return taken

    def _report(self, report: Report) -> None:
        """Nobody asks."""

    def _take(self, responses: Responses) -> None:
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
            self._context += self._prompts[row.request] + len(mine)
        self._drawn += drawn
        self._ticks += bool(drawn)


def random_prompts(count: int, tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """No two of them begin alike."""
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)]


def calm() -> None:
    """What lives now is not looked at by the garbage collector again, as in the engine's own process."""
    gc.collect()
    gc.freeze()


def _submit(number: int, ask: Ask, sampling: SamplingParams) -> Submit:
    """What a router would have sent."""
    return Submit(
        request=number,
        attempt=0,
        engine_epoch=1,
        name=str(number),
        prompt=ask.prompt,
        n=1,
        sampling=sampling,
        stopping=StopParams(max_tokens=ask.max_tokens),
        text=TextParams(),
        priority=2,
        salt="",
        time_limit=None,
        detokenizer=HERE,
        router=HERE,
    )
