"""The results of `sluice bench`: a table, a JSON file, the errors."""

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
from sluice.loadgen.outcome import Outcome
from sluice.loadgen.run import Pace

NAMES = {"ttft": "time to first token", "tpot": "per token after it", "itl": "between chunks", "e2el": "end to end"}
SHOWN_ERRORS = 3


def heading(server: BenchServer, model: str, label: str, requests: int, pace: Pace) -> dict[str, Any]:
    """The fields of `vllm bench serve` about the run itself, and the server's name."""
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
    """An object, or a list of them for several servers."""
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


def _title(found: dict[str, Any]) -> str:
    failed = f", {found['failed']} failed" if found["failed"] else ""
    return f"{found['model_id']}: {found['completed']} requests{failed} in {found['duration']:.1f} s"


def _rates(found: dict[str, Any]) -> str:
    goodput = "" if found["request_goodput"] is None else f" · goodput {found['request_goodput']:.2f} requests/s"
    return (
        f"{found['request_throughput']:.2f} requests/s{goodput} · {found['output_throughput']:.0f} output "
        f"tokens/s · {found['total_token_throughput']:.0f} tokens/s with prompts · at most "
        f"{found['max_concurrent_requests']} at once"
    )


def _times(found: dict[str, Any], ranks: Sequence[float]) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("ms")
    for column in ("mean", "std", *map(report.percentile_name, ranks)):
        table.add_column(column, justify="right")
    for name in report.METRICS:
        cells = [found[f"{kind}_{name}_ms"] for kind in ("mean", "std", *map(report.percentile_name, ranks))]
        table.add_row(NAMES[name], *(f"{cell:.1f}" for cell in cells))
    return table


def _side_by_side(results: Sequence[dict[str, Any]], ranks: Sequence[float]) -> Table:
    """A column per server."""
    table = Table(box=SIMPLE)
    table.add_column("")
    for found in results:
        table.add_column(found["server"], justify="right")

    def row(name: str, show: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(name, *map(show, results))

    row("requests", lambda found: str(found["completed"]))
    row("failed", lambda found: str(found["failed"]))
    row("output tokens", lambda found: str(found["total_output_tokens"]))
    row("output tokens/s", lambda found: f"{found['output_throughput']:.0f}")
    row("  of the rounds", lambda found: _span(found["output_throughput_of_rounds"]))
    if results[0]["request_goodput"] is not None:
        row("goodput, requests/s", lambda found: f"{found['request_goodput']:.2f}")
    for name in report.METRICS:
        for rank in map(report.percentile_name, ranks):
            cells = [found[f"{rank}_{name}_ms"] for found in results]
            table.add_row(f"{NAMES[name]}, ms, {rank}", *(f"{cell:.1f}" for cell in cells))
    return table


def _span(rates: Sequence[float]) -> str:
    return f"{min(rates):.0f}–{max(rates):.0f}"


def show_errors(name: str, outcomes: Sequence[Outcome]) -> None:
    failed = [each for each in outcomes if not each.succeeded]
    for each in failed[:SHOWN_ERRORS]:
        notes().print(f"{name} failed: {each.error}", style="red", markup=False)
    if len(failed) > SHOWN_ERRORS:
        notes().print(f"and {len(failed) - SHOWN_ERRORS} more", style="red")
