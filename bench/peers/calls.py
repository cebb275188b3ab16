"""The command line that every peer's child has. Imported in the peers' environments, as is bench.harness.load:
nothing here may need more than msgspec."""

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

from bench.harness.children import claim_output, serve
from bench.harness.load import Ask, Load, Run, Trace

Clock = Callable[[], float]
"""Seconds since the load began."""
Serving = Callable[[Load, Clock], list[Trace]]


def main(convert: Callable[[Path, Path, str], None], start: Callable[[Path, int, int], Serving]) -> None:
    """`start`: of the model's folder, threads, and most requests at once."""
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


def in_groups(load: Load, group: Callable[[list[Ask]], list[Trace]]) -> list[Trace]:
    """For systems without a scheduler: the requests in the order of their load, `width` at a time."""
    return [
        trace for at in range(0, len(load.asks), load.width) for trace in group(list(load.asks[at : at + load.width]))
    ]
