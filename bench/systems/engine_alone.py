"""The engine's core in a process of its own, without the ring: no sockets, no serialisation, no text.

python -m bench.systems.engine_alone [the engine's own flags, such as --model]
"""

import gc
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.arrivals import Arrivals
from bench.children import Child, serve
from bench.engine_load import EngineAsk, EngineLoad, EngineRun
from bench.load import Trace
from bench.systems.share import Share
from engine_worker.__main__ import load
from engine_worker.core.assembly import assemble, longest_sequence
from engine_worker.core.engine import Engine
from engine_worker.core.intake import Terms
from engine_worker.hooks import Hooks, Opened, Report, Responses, Stop
from engine_worker.parallel.rank_env import find_place
from engine_worker.step import Runner
from sluice.launch.plan import child_environment
from sluice.ring.checkpoint import open_checkpoint
from sluice.ring.params import SamplingParams, StopParams, TextParams
from sluice.ring.wire import Submit, TokenRow
from sluice.settings.read import load_settings
from sluice.settings.services import EngineSettings
from sluice.telemetry import configure

NAME = "Sluice, engine alone"
HERE = "inproc://here"
EPOCH = 1
ATTEMPT = 0
IDLE_SECONDS = 0.001

Heard = tuple[float, list[tuple[int, TokenRow]]]
"""When, and what of which request of the load."""


class EngineAlone:
    """Puts loads on an engine of its own."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._checkpoint = open_checkpoint(settings.model)
        self._log = configure("engine alone", "warning")
        place = find_place(settings.tensor_parallel, os.environ)
        # Other ranks, if there are any, end with this process.
        self._runner = load(settings, place, self._checkpoint, self._log, ExitStack())
        self._ahead = 0.0
        self._submitted: list[Submit] = []
        self._stops: list[Stop] = []
        self._opened: list[Opened] = []
        self._sent: list[tuple[float, list[TokenRow]]] = []
        self._steps = 0
        self._next_number = 0
        self._engine = self._assemble(settings, self._runner)
        gc.collect()
        gc.freeze()  # as the engine's own process does

    def answer(self, load: EngineLoad) -> EngineRun:
        """Serve the load. Rows are only counted while the clock runs, and looked at afterwards."""
        engine = self._engine if load.settings is None else self._changed(load.settings)
        arrivals, base = Arrivals(load), self._next_number
        self._next_number += len(load.asks)
        submitted: dict[int, float] = {}
        heard: list[Heard] = []
        self._opened.clear()
        self._steps = 0
        cpu, began = time.process_time(), time.perf_counter()
        while True:
            for i, at in arrivals.due(time.perf_counter() - began):
                self._ahead += load.asks[i].passed
                self._submitted.append(_submit(base + i, load.asks[i], load))
                submitted[i] = at
            if arrivals.over:
                break
            if not engine.step() and not self._sent:
                time.sleep(IDLE_SECONDS)
            for at, rows in self._sent:
                some = [(row.request - base, row) for row in rows]
                self._stops += [Stop(base + i, ATTEMPT) for i, row in some if _is_enough(load.asks[i], row)]
                heard.append((at - began, some))
                arrivals.heard(at - began, some)
            self._sent.clear()
        used = {"engine": time.process_time() - cpu}
        while engine.step():
            pass  # steps that were begun ahead: the next load's engine may be another
        cached = {opened.spec.request - base: opened.cached_tokens for opened in self._opened}
        return EngineRun(heard[-1][0], used, _traces(submitted, cached, heard), self._steps)

    def _changed(self, settings: dict[str, Any]) -> Engine:
        changed = replace(self._settings, **settings)
        return self._assemble(changed, Share(self._runner, changed))

    def _assemble(self, settings: EngineSettings, runner: Runner) -> Engine:
        checkpoint = self._checkpoint
        terms = Terms(
            fingerprint=checkpoint.fingerprint,
            vocab_size=checkpoint.vocab_size,
            max_sequence_tokens=longest_sequence(runner, settings, checkpoint.max_context_tokens),
            max_requests=settings.max_requests,
        )
        hooks = Hooks(self._get_requests, self._keep, self._get_stops, self._count)
        clock = lambda: time.monotonic() + self._ahead  # noqa: E731
        return assemble(runner, terms, settings, hooks, clock, self._log)

    def _get_requests(self, limit: int) -> list[Submit]:
        taken, self._submitted = self._submitted[:limit], self._submitted[limit:]
        return taken

    def _get_stops(self) -> list[Stop]:
        taken, self._stops = self._stops, []
        return taken

    def _keep(self, responses: Responses) -> None:
        for _, fault in responses.refused:
            raise RuntimeError(f"the engine refused: {fault.message}")
        self._opened += responses.opened
        self._sent.append((time.perf_counter(), responses.rows))

    def _count(self, report: Report) -> None:
        self._steps += report.step is not None


def _is_enough(ask: EngineAsk, row: TokenRow) -> bool:
    return ask.ends_after is not None and row.end is None and row.offset + len(row.tokens) >= ask.ends_after


def _traces(submitted: Mapping[int, float], cached: Mapping[int, int], heard: list[Heard]) -> list[Trace]:
    """In the order of the load."""
    traces = [Trace(at, [], [], [], cached[i]) for i, at in sorted(submitted.items())]
    for at, rows in heard:
        for i, row in rows:
            if row.end is not None and row.end.fault is not None:
                raise RuntimeError(f"the engine failed: {row.end.fault.message}")
            if row.tokens:
                traces[i].arrivals.append(at)
                traces[i].counts.append(len(row.tokens))
                traces[i].tokens.extend(row.tokens)
    return traces


def _submit(number: int, ask: EngineAsk, load: EngineLoad) -> Submit:
    """What a router would have sent."""
    return Submit(
        request=number,
        attempt=ATTEMPT,
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
        retention=ask.retention,
    )


def engine_alone(model: Path, engine: Mapping[str, Any], logs: Path) -> Child[EngineRun]:
    """A process whose engine has these settings, in the environment that a ring's engine has."""
    settings = {"model": model, **engine}
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    log = logs / "engine-alone.log"
    return Child(NAME, "bench.systems.engine_alone", flags, log, EngineRun, child_environment())


if __name__ == "__main__":
    serve(EngineAlone(load_settings(EngineSettings)).answer, EngineLoad)
