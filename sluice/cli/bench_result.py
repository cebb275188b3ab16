"""Prints the results of `sluice bench` as a table and as JSON, and the errors of failed requests."""

import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sluice.cli.bench_servers import BenchServer
from sluice.cli.common import fail, notes
from sluice.loadgen import report
from sluice.loadgen.run import Pace
from sluice.loadgen.target import Outcome

NAMES = {
    "ttft": "time to first token",
    "tpot": "per token after it",
    "itl": "between chunks",
    "e2el": "end to end",
}
SHOWN_ERRORS = 3


def heading(server: BenchServer, model: str, label: str, requests: int, pace: Pace) -> dict[str, Any]:
    """The fields that describe the run, named as by `vllm bench serve`, and the server's name."""
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": server.api,
        "endpoint_type": server.api,
        "server": server.name,
        "label": label or None,
        "model_id": model,
        "num_prompts": requests,
        "request_rate": pace.rate or "inf",
        "burstiness": 1.0,
        "max_concurrency": pace.concurrency,
    }


def write(results: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Write the results to `path`: a JSON object, or for several servers a list of objects."""
    text = json.dumps(results if len(results) > 1 else results[0]) + "\n"
    if path == Path("-"):
        sys.stdout.write(text)
    elif path is not None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise fail(f"--json: {path} cannot be written: {error}") from error


def show(results: Sequence[dict[str, Any]], ranks: Sequence[float]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if len(results) == 1:
        console.print(_title(results[0]), _times(results[0], ranks), _rates(results[0]), sep="\n", markup=False)
    else:
        console.print(_side_by_side(results, ranks), markup=False)


def _title(result: dict[str, Any]) -> str:
    failed = f", {result['failed']} failed" if result["failed"] else ""
    about = f"{result['model_id']} at {result['server']}"
    return f"{about}: {result['completed']} requests{failed} in {result['duration']:.1f} s"


def _rates(result: dict[str, Any]) -> str:
    goodput = "" if result["request_goodput"] is None else f" · goodput {result['request_goodput']:.2f} requests/s"
    return (
        f"{result['request_throughput']:.2f} requests/s{goodput} · {result['output_throughput']:.0f} output "
        f"tokens/s · {result['total_token_throughput']:.0f} tokens/s including prompts · at most "
        f"{result['max_concurrent_requests']} requests in flight"
    )


def _times(result: dict[str, Any], ranks: Sequence[float]) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("ms")
    for column in ("mean", "std", *map(report.percentile_name, ranks)):
        table.add_column(column, justify="right")
    for name in report.METRICS:
        cells = [result[f"{kind}_{name}_ms"] for kind in ("mean", "std", *map(report.percentile_name, ranks))]
        table.add_row(NAMES[name], *(f"{cell:.1f}" for cell in cells))
    return table


def _side_by_side(results: Sequence[dict[str, Any]], ranks: Sequence[float]) -> Table:
    """A table with a column per server."""
    table = Table(box=SIMPLE)
    table.add_column("")
    for result in results:
        table.add_column(result["server"], justify="right")

    def row(name: str, show: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(name, *map(show, results))

    row("requests", lambda result: str(result["completed"]))
    row("failed", lambda result: str(result["failed"]))
    row("output tokens", lambda result: str(result["total_output_tokens"]))
    row("output tokens/s", lambda result: f"{result['output_throughput']:.0f}")
    row("  of the rounds", lambda result: _span(result["output_throughput_of_rounds"]))
    if results[0]["request_goodput"] is not None:
        row("goodput, requests/s", lambda result: f"{result['request_goodput']:.2f}")
    for name in report.METRICS:
        for rank in map(report.percentile_name, ranks):
            cells = [found[f"{rank}_{name}_ms"] for found in results]
            table.add_row(f"{NAMES[name]}, ms, {rank}", *(f"{cell:.1f}" for cell in cells))
    return table


def _span(rates: Sequence[float]) -> str:
    return f"{min(rates):.0f}–{max(rates):.0f}"


def show_errors(name: str, outcomes: Sequence[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if not outcome.succeeded]
    for outcome in failed[:SHOWN_ERRORS]:
        notes().print(f"{name} failed: {outcome.error}", style="red", markup=False)
    if len(failed) > SHOWN_ERRORS:
        notes().print(f"and {len(failed) - SHOWN_ERRORS} more", style="red")
