"""The engine's core in a process of its own, without the ring: no sockets, no serialisation, no text.

python -m bench.systems.engine_alone [the engine's own flags, such as --model]
"""

import gc
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from bench.children import Child, serve
from bench.load import Ask, Feed, Load, Run, Trace
from engine_worker.__main__ import load
from engine_worker.assembly import Batching, assemble
from engine_worker.config import EngineSettings, read_settings
from engine_worker.engine import Engine
from engine_worker.intake import Terms
from engine_worker.outbox import Outbox
from sluice.launch.plan import child_environment
from sluice.ring.checkpoint import open_checkpoint
from sluice.ring.params import SamplingParams, StopParams, TextParams
from sluice.ring.wire import Cancel, Message, Submit, TokenBatch
from sluice.telemetry import configure

NAME = "Sluice, engine alone"
HERE = "inproc://here"
EPOCH = 1


class HereLane:
    """The engine's only lane: keeps what the outbox sends, with its time."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, TokenBatch]] = []

    def ready(self) -> bool:
        """There is always room."""
        return True

    def send(self, message: Message) -> bool:
        """Keep it."""
        if isinstance(message, TokenBatch):
            self.sent.append((time.perf_counter(), message))
        return True

    def close(self, linger: float = 0.0) -> None:
        """Nothing to close."""

    def take(self) -> list[tuple[float, TokenBatch]]:
        """What has come since the last time."""
        taken, self.sent = self.sent, []
        return taken


class EngineAlone:
    """Puts loads on an engine of its own."""

    def __init__(self, settings: EngineSettings) -> None:
        self._lane = HereLane()
        self._inbox: list[Submit | Cancel] = []
        self._numbers = count()
        self._engine = _assemble(settings, self._receive, self._lane)

    def answer(self, load: Load) -> Run:
        """Serve the load. Rows are only counted while the clock runs, and looked at afterwards."""
        feed = Feed(load)
        submitted: dict[int, float] = {}
        batches: list[tuple[float, TokenBatch]] = []
        cpu, began = time.process_time(), time.perf_counter()
        while True:
            for i in feed.due():
                number = next(self._numbers)
                self._inbox.append(_submit(number, load.asks[i], load))
                submitted[number] = time.perf_counter() - began
            if not feed.live:
                break
            self._engine.step()
            for at, batch in self._lane.take():
                batches.append((at - began, batch))
                feed.ended(len(batch.ends))
        used = {"engine": time.process_time() - cpu}
        return Run(batches[-1][0], used, _traces(submitted, batches))

    def _receive(self) -> list[Submit | Cancel]:
        taken, self._inbox = self._inbox, []
        return taken


def _assemble(settings: EngineSettings, receive: Callable[[], list[Submit | Cancel]], lane: HereLane) -> Engine:
    checkpoint = open_checkpoint(settings.model)
    log = configure("engine alone", "warning")
    runner = load(settings, checkpoint, log)
    gc.collect()
    gc.freeze()  # as the engine's own process does
    terms = Terms(
        epoch=EPOCH,
        fingerprint=checkpoint.fingerprint,
        vocab_size=checkpoint.vocab_size,
        max_sequence_tokens=min(checkpoint.max_context_tokens, runner.num_blocks * runner.tokens_per_block),
        max_requests=settings.max_requests,
    )
    batching = Batching(
        settings.max_batch_size, settings.max_tokens_per_step, settings.chunked_context, settings.block_reuse
    )
    outbox = Outbox("alone", EPOCH, lambda _: lane, time.monotonic, log)
    return assemble(runner, terms, batching, receive, outbox, time.monotonic, log)


def _traces(submitted: Mapping[int, float], batches: list[tuple[float, TokenBatch]]) -> list[Trace]:
    traces = {number: Trace(at, [], [], []) for number, at in submitted.items()}
    for at, batch in batches:
        for row in batch.rows():
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
