"""The result of `sluice bench`: a table, a JSON file, the errors."""

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sluice.cli.common import fail, notes
from sluice.loadgen import report
from sluice.loadgen.outcome import Outcome
from sluice.loadgen.run import Pace

NAMES = {"ttft": "time to first token", "tpot": "per token after it", "itl": "between chunks", "e2el": "end to end"}
SHOWN_ERRORS = 3


def heading(api: str, model: str, label: str, requests: int, pace: Pace) -> dict[str, Any]:
    """The fields of `vllm bench serve` about the run itself."""
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": api,
        "endpoint_type": api,
        "label": label or None,
        "model_id": model,
        "num_prompts": requests,
        "request_rate": pace.rate or "inf",
        "burstiness": 1.0,
        "max_concurrency": pace.concurrency,
    }


def write(result: dict[str, Any], path: Path | None) -> None:
    if path == Path("-"):
        sys.stdout.write(json.dumps(result) + "\n")
    elif path is not None:
        try:
            path.write_text(json.dumps(result) + "\n", encoding="utf-8")
        except OSError as error:
            raise fail(f"--json: {path} cannot be written: {error}") from error


def show(about: dict[str, Any], figures: dict[str, Any], ranks: list[float]) -> None:
    """A table of times, with the throughput below."""
    failed = f", {figures['failed']} failed" if figures["failed"] else ""
    title = f"{about['model_id']}: {figures['completed']} requests{failed} in {figures['duration']:.1f} s"
    goodput = "" if figures["request_goodput"] is None else f" · goodput {figures['request_goodput']:.2f} requests/s"
    throughput = (
        f"{figures['request_throughput']:.2f} requests/s{goodput} · {figures['output_throughput']:.0f} output "
        f"tokens/s · {figures['total_token_throughput']:.0f} tokens/s with prompts · at most "
        f"{figures['max_concurrent_requests']} at once"
    )
    found = Table(box=SIMPLE)
    found.add_column("ms")
    for column in ("mean", "std", *map(report.percentile_name, ranks)):
        found.add_column(column, justify="right")
    for name in report.METRICS:
        cells = [figures[f"{kind}_{name}_ms"] for kind in ("mean", "std", *map(report.percentile_name, ranks))]
        found.add_row(NAMES[name], *(f"{cell:.1f}" for cell in cells))
    console = Console(highlight=False, soft_wrap=True)
    console.print(title, found, throughput, sep="\n", markup=False)


def show_errors(outcomes: Sequence[Outcome]) -> None:
    failed = [each for each in outcomes if not each.succeeded]
    for each in failed[:SHOWN_ERRORS]:
        notes().print(f"failed: {each.error}", style="red", markup=False)
    if len(failed) > SHOWN_ERRORS:
        notes().print(f"and {len(failed) - SHOWN_ERRORS} more", style="red")
