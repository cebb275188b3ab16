"""`sluice stats`: a live table of the engines' statistics."""

import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from sluice.cli.common import Server, with_server
from sluice.cli.health import FILE_WIDTH, TIMEOUT_SECONDS, detokenizers_table
from sluice.v1 import admin_pb2

MODEL_WIDTH = 8
"""Characters of a model's fingerprint that are shown: enough to distinguish the models of a ring."""
COLUMNS = (
    "engine", "step", "ms", "requests", "batch", "queued", "paused", "context", "generation", "KV blocks",
    "host blocks", "reuse", "tokens/s",
)  # fmt: skip


@with_server
def stats(
    server: Server,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two updates.")] = 0.5,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print the statistics once and exit. The default if stdout is not a terminal."),
    ] = False,
) -> None:
    """Show live statistics of engines and detokenizers.

    Ctrl-C ends the command.
    """
    console = Console(highlight=False)
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        if once or not console.is_terminal:
            console.width = console.width if console.is_terminal else FILE_WIDTH
            console.print(tables(client.stats()))
            return
        with suppress(KeyboardInterrupt), Live(tables(client.stats()), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(tables(client.stats()), refresh=True)


def tables(stats: admin_pb2.Stats) -> Group:
    """Tables of engines and detokenizers. The engines' models are shown if they differ."""
    models = {engine.model_fingerprint for engine in stats.engines}
    mixed = [_mixed(len(models), stats.serving_model_fingerprint)] if len(models) > 1 else []
    return Group(*mixed, _engines(stats, bool(mixed)), detokenizers_table(stats))


def _mixed(models: int, serving: str) -> str:
    targets = f"engines with model {serving[:MODEL_WIDTH]}" if serving else "all engines"
    return f"The engines serve {models} different models; new requests go to {targets}."


def _engines(stats: admin_pb2.Stats, mixed: bool) -> Table:
    table = Table(box=SIMPLE)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "engine" else "right")
    if mixed:
        table.add_column("model")
    for engine in stats.engines:
        table.add_row(
            engine.engine_id,
            str(engine.iteration),
            f"{engine.step_time.ToNanoseconds() / 1e6:.1f}",
            str(engine.active_requests),
            f"{engine.scheduled_requests} of {engine.max_batch_size}",
            str(engine.queued_requests),
            str(engine.paused_requests),
            f"{engine.context_requests} ({engine.total_context_tokens} tokens)",
            str(engine.generation_requests),
            f"{engine.used_kv_blocks} of {engine.max_kv_blocks}",
            f"{engine.used_host_blocks} of {engine.max_host_blocks}" if engine.max_host_blocks else "",
            f"{engine.prefix_cache_hit_ratio:.0%}",
            f"{engine.tokens_per_second:.0f}",
            *([_model(engine)] if mixed else ()),
        )
    return table


def _model(engine: admin_pb2.EngineStats) -> str:
    return escape(f"{engine.model_fingerprint[:MODEL_WIDTH]} {engine.model_version}".rstrip())
