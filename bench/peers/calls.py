"""The command line of every peer's child process. This module and bench.harness.load are imported in the peers'
environments, so they may import no package except msgspec."""

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

from bench.harness.children import claim_output, serve
from bench.harness.load import Load, PlannedRequest, Run, Trace

Clock = Callable[[], float]
"""Seconds since the load began."""
Serving = Callable[[Load, Clock], list[Trace]]


def main(convert: Callable[[Path, Path, str], None], start: Callable[[Path, int, int], Serving]) -> None:
    """Runs the command line. `start` takes the model's folder, threads, and the maximum number of requests in
    flight."""
    command, *arguments = sys.argv[1:]
    if command == "convert":
        source, folder, precision = arguments
        convert(Path(source), Path(folder), precision)
        return
    model, threads, width = arguments
    lines = claim_output()
    serving = start(Path(model), int(threads), int(width))
    serve(lambda load: _answer(serving, load), lines)


def _answer(serving: Serving, load: Load) -> Run:
    cpu, began = process_time(), perf_counter()
    traces = serving(load, lambda: perf_counter() - began)
    return Run(max(trace.arrivals[-1] for trace in traces), {"peer": process_time() - cpu}, traces)


def in_groups(load: Load, group: Callable[[list[PlannedRequest]], list[Trace]]) -> list[Trace]:
    """For systems without a scheduler: runs the requests in groups of `width`, in the order of the load."""
    groups = (list(load.requests[at : at + load.width]) for at in range(0, len(load.requests), load.width))
    return [trace for requests in groups for trace in group(requests)]
