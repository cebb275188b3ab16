"""The engine's core in a process of its own, without the ring: no sockets, no serialisation, no text.

python -m bench.systems.engine_alone [the engine's own flags, such as --model]
"""

import gc
import sys
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from bench.children import Child, serve
from bench.load import Ask, Feed, Load, Run, Trace
from engine_worker.__main__ import load
from engine_worker.assembly import Batching, assemble
from engine_worker.config import EngineSettings, read_settings
from engine_worker.engine import Engine
from engine_worker.hooks import Hooks, Responses
from engine_worker.intake import Terms
from sluice.launch.plan import child_environment
from sluice.ring.checkpoint import open_checkpoint
from sluice.ring.params import SamplingParams, StopParams, TextParams
from sluice.ring.wire import Submit, TokenRow
from sluice.telemetry import configure

NAME = "Sluice, engine alone"
HERE = "inproc://here"
EPOCH = 1


class EngineAlone:
    """Puts loads on an engine of its own."""

    def __init__(self, settings: EngineSettings) -> None:
        self._submitted: list[Submit] = []
        self._sent: list[tuple[float, list[TokenRow]]] = []
        self._numbers = count()
        hooks = Hooks(self._get_requests, self._keep, lambda: (), lambda _: None)
        self._engine = _assemble(settings, hooks)

    def answer(self, load: Load) -> Run:
        """Serve the load. Rows are only counted while the clock runs, and looked at afterwards."""
        feed = Feed(load)
        submitted: dict[int, float] = {}
        rows: list[tuple[float, list[TokenRow]]] = []
        cpu, began = time.process_time(), time.perf_counter()
        while True:
            for i in feed.due():
                number = next(self._numbers)
                self._submitted.append(_submit(number, load.asks[i], load))
                submitted[number] = time.perf_counter() - began
            if not feed.live:
                break
            self._engine.step()
            for at, some in self._sent:
                rows.append((at - began, some))
                feed.ended(sum(row.end is not None for row in some))
            self._sent.clear()
        used = {"engine": time.process_time() - cpu}
        return Run(rows[-1][0], used, _traces(submitted, rows))

    def _get_requests(self, limit: int) -> list[Submit]:
        taken, self._submitted = self._submitted[:limit], self._submitted[limit:]
        return taken

    def _keep(self, responses: Responses) -> None:
        for _, fault in responses.refused:
            raise RuntimeError(f"the engine refused: {fault.message}")
        self._sent.append((time.perf_counter(), responses.rows))


def _assemble(settings: EngineSettings, hooks: Hooks) -> Engine:
    checkpoint = open_checkpoint(settings.model)
    log = configure("engine alone", "warning")
    runner = load(settings, checkpoint, log)
    gc.collect()
    gc.freeze()  # as the engine's own process does
    terms = Terms(
        fingerprint=checkpoint.fingerprint,
        vocab_size=checkpoint.vocab_size,
        max_sequence_tokens=min(checkpoint.max_context_tokens, runner.num_blocks * runner.tokens_per_block),
        max_requests=settings.max_requests,
    )
    batching = Batching(
        settings.max_batch_size, settings.max_tokens_per_step, settings.chunked_context, settings.block_reuse
    )
    return assemble(runner, terms, batching, hooks, time.monotonic, log)


def _traces(submitted: Mapping[int, float], rows: list[tuple[float, list[TokenRow]]]) -> list[Trace]:
    traces = {number: Trace(at, [], [], []) for number, at in submitted.items()}
    for at, some in rows:
        for row in some:
            trace = traces[row.request]
            if row.end is not None and row.end.fault is not None:
                raise RuntimeError(f"the engine failed: {row.end.fault.message}")
            if row.tokens:
                trace.arrivals.append(at)
                trace.counts.append(len(row.tokens))
                trace.tokens.extend(row.tokens)
    return list(traces.values())


def _submit(number: int, ask: Ask, load: Load) -> Submit:
    """What a router would have sent."""
    return Submit(
        request=number,
        attempt=0,
        engine_epoch=EPOCH,
        name=str(number),
        prompt=ask.prompt,
        n=1,
        sampling=SamplingParams(temperature=0.0),
        stopping=StopParams(max_tokens=ask.max_tokens),
        text=TextParams(),
        priority=2,
        salt=load.salt,
        time_limit=None,
        detokenizer=HERE,
        router=HERE,
    )


def engine_alone(model: Path, engine: Mapping[str, Any], logs: Path) -> Child:
    """A process whose engine has these settings, in the environment that a ring's engine has."""
    settings = {"model": model, **engine}
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return Child(NAME, "bench.systems.engine_alone", flags, logs / "engine-alone.log", child_environment())


if __name__ == "__main__":
    serve(EngineAlone(read_settings(sys.argv[1:])).answer)
