"""The engine's core in a separate process, without the ring: no sockets, no serialization, no text.

python -m bench.systems.engine_alone [the engine's own flags, such as --model]
"""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness.children import ROOT, SystemProcess, serve
from bench.harness.load import Arrivals, Load, PlannedRequest, Run, Trace
from bench.systems.direct import ATTEMPT, Inbox, freeze_heap, submit
from engine_worker.__main__ import load
from engine_worker.core.engine import Engine
from engine_worker.core.refusals import EngineLimits, longest_sequence
from engine_worker.hooks import Hooks, Report, Responses, Stop
from engine_worker.parallel.rank_env import read_rank_env
from engine_worker.protocol import Runner
from sluice.checkpoint.folder import open_checkpoint
from sluice.launch.environment import child_environment
from sluice.settings.read import load_settings
from sluice.settings.services import EngineSettings
from sluice.telemetry.logs import configure
from sluice.telemetry.probes import Startup
from sluice.wire.params import BeamSearchParams, SamplingParams, Speculation
from sluice.wire.requests import NO_EXTRAS, Extras, Submit
from sluice.wire.rows import Open, TokenRow

NAME = "Sluice, engine alone"
IDLE_SECONDS = 0.001

IndexedRows = tuple[float, list[tuple[int, TokenRow]]]  # Time of the step, and its rows with the indices of requests.


class RunnerShare:
    """A runner restricted to other settings: fewer blocks, and without its draft model unless the settings name one."""

    def __init__(self, runner: Runner, settings: EngineSettings) -> None:
        self._runner = runner
        tokens = settings.kv_cache_tokens
        wanted = runner.num_blocks if tokens is None else tokens // runner.tokens_per_block
        self.num_blocks = min(runner.num_blocks, wanted)
        self.num_host_blocks = runner.num_host_blocks if settings.kv_host_memory else 0
        self.draft_context = None if settings.draft_model is None else runner.draft_context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class EngineAlone:
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._log = configure("engine alone", "warning")
        # This ExitStack is never closed: other ranks, if any, end with this process.
        rank_env = read_rank_env(settings.tensor_parallel, os.environ)
        small = open_checkpoint(settings.model, weights=False)
        self._checkpoint, self._runner = load(settings, rank_env, small, Startup(), self._log, ExitStack())
        self._ahead = 0.0
        self._inbox = Inbox()
        self._opened: list[Open] = []
        self._sent: list[tuple[float, list[TokenRow]]] = []
        self._steps = self._drafted = self._accepted = 0
        self._next_number = 0
        self._engine = self._assemble(settings, self._runner)
        freeze_heap()

    def answer(self, load: Load) -> Run:
        """Rows are only collected during the run, and evaluated afterwards."""
        engine = self._engine if load.settings is None else self._changed(load.settings)
        arrivals, base = Arrivals(load), self._next_number
        self._next_number += len(load.requests)
        submitted: dict[int, float] = {}
        received: list[IndexedRows] = []
        self._opened.clear()
        self._steps = self._drafted = self._accepted = 0
        cpu, began = time.process_time(), time.perf_counter()
        while True:
            for i, at in arrivals.due(time.perf_counter() - began):
                self._ahead += load.requests[i].passed
                request = load.requests[i]
                self._inbox.submits.append(_submit(base + i, i, request, load.salt))
                submitted[i] = at
            if arrivals.over:
                break
            if not engine.step() and not self._sent:
                time.sleep(IDLE_SECONDS)
            for at, rows in self._sent:
                some = [(row.request - base, row) for row in rows]
                self._inbox.stops += [Stop(base + i, ATTEMPT) for i, row in some if _is_enough(load.requests[i], row)]
                received.append((at - began, some))
                arrivals.on_rows(at - began, some)
            self._sent.clear()
        used = {"engine": time.process_time() - cpu}
        while engine.step():
            pass  # Complete the steps in flight: the next load may use a new engine.
        cached = {opened.request - base: opened.cached_tokens for opened in self._opened}
        traces = _traces(submitted, cached, received)
        return Run(received[-1][0], used, traces, self._steps, self._drafted, self._accepted)

    def _changed(self, settings: dict[str, Any]) -> Engine:
        changed = replace(self._settings, **settings)
        return self._assemble(changed, RunnerShare(self._runner, changed))

    def _assemble(self, settings: EngineSettings, runner: Runner) -> Engine:
        checkpoint = self._checkpoint
        limits = EngineLimits(
            fingerprint=checkpoint.fingerprint,
            vocab_size=checkpoint.vocab_size,
            max_sequence_tokens=longest_sequence(runner, settings, checkpoint.max_context_tokens),
            max_requests=settings.max_requests,
            max_draft_tokens=settings.draft_tokens,
            has_adapters=runner.adapters is not None,
        )
        hooks = Hooks(self._inbox.get_requests, self._keep, self._inbox.get_stops, self._count)
        clock = lambda: time.monotonic() + self._ahead  # noqa: E731
        return Engine(runner, limits, settings, hooks, clock, self._log)

    def _keep(self, responses: Responses) -> None:
        for _, fault in responses.refused:
            raise RuntimeError(f"the engine refused: {fault.message}")
        self._opened += responses.opened
        self._sent.append((time.perf_counter(), responses.rows))

    def _count(self, report: Report) -> None:
        if report.step is not None:
            self._steps += 1
            self._drafted += report.step.draft_tokens
            self._accepted += report.step.accepted_draft_tokens


def _submit(number: int, seed: int, request: PlannedRequest, salt: str) -> Submit:
    search = BeamSearchParams(request.n) if request.beams else None
    sampling = SamplingParams(temperature=request.temperature, seed=seed, beam_search=search)
    speculation = Speculation(draft_token_ids=tuple(request.expected))
    extras = Extras(
        retention=request.retention,
        speculation=speculation,
        prompt_logprobs=request.prompt_logprobs,
        adapter=request.adapter,
    )
    used = None if extras == NO_EXTRAS else extras
    return submit(number, request.prompt, request.max_tokens, sampling, n=request.n, salt=salt, extras=used)


def _is_enough(request: PlannedRequest, row: TokenRow) -> bool:
    return request.ends_after is not None and row.end is None and row.offset + len(row.tokens) >= request.ends_after


def _traces(submitted: Mapping[int, float], cached: Mapping[int, int], received: list[IndexedRows]) -> list[Trace]:
    traces = [Trace(at, [], [], [], cached[i]) for i, at in sorted(submitted.items())]
    for at, rows in received:
        for i, row in rows:
            if row.end is not None and row.end.fault is not None:
                raise RuntimeError(f"the engine failed: {row.end.fault.message}")
            if row.tokens:
                traces[i].arrivals.append(at)
                traces[i].counts.append(len(row.tokens))
                traces[i].tokens.extend(row.tokens)
    return traces


def engine_alone(
    model: Path, engine: Mapping[str, Any], logs: Path, root: Path = ROOT, *, without_model: bool = False
) -> SystemProcess:
    """A child process with these engine settings, in the environment of a ring's engine, from the checkout `root`."""
    settings = {"model": model, **engine}
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    log = logs / "engine-alone.log"
    program = ROOT / "bench" / "systems" / "without_model.py" if without_model else "bench.systems.engine_alone"
    return SystemProcess(NAME, program, flags, log, child_environment(), root=root)


if __name__ == "__main__":
    serve(EngineAlone(load_settings(EngineSettings)).answer)
