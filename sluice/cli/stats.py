"""`sluice stats`: a live table of the engines' statistics."""

import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from sluice.cli.common import TIMEOUT_SECONDS, Server, stdout_console, with_server
from sluice.top.panels import Column, shown_columns, table
from sluice.v1 import admin_pb2

MODEL_WIDTH = 8
"""Characters of a model's fingerprint that are shown: enough to distinguish the models of a ring."""
COLUMNS = (
    Column("engine", lambda engine: engine.engine_id, right=False),
    Column("step", lambda engine: str(engine.iteration), wide=True),
    Column("ms", lambda engine: f"{engine.step_time.ToNanoseconds() / 1e6:.1f}", wide=True),
    Column("requests", lambda engine: str(engine.active_requests), wide=True),
    Column("batch", lambda engine: f"{engine.scheduled_requests} of {engine.max_batch_size}"),
    Column("queued", lambda engine: str(engine.queued_requests)),
    Column("paused", lambda engine: str(engine.paused_requests)),
    Column("context", lambda engine: f"{engine.context_requests} ({engine.total_context_tokens} tokens)", wide=True),
    Column("generation", lambda engine: str(engine.generation_requests), wide=True),
    Column("KV blocks", lambda engine: f"{engine.used_kv_blocks} of {engine.max_kv_blocks}"),
    Column("host blocks", lambda engine: _host_blocks(engine), wide=True),
    Column("reuse", lambda engine: f"{engine.prefix_cache_hit_ratio:.0%}"),
    Column("tokens/s", lambda engine: f"{engine.tokens_per_second:.0f}"),
)
DETOKENIZER_COLUMNS = (
    Column("detokenizer", lambda each: each.detokenizer_id, right=False),
    Column("streams", lambda each: str(each.streams), right=False),
    Column("waiting", lambda each: str(each.queue_depth), right=False),
    Column("tokens/s", lambda each: f"{each.tokens_per_second:.0f}", right=False),
)


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
    console = stdout_console()
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        if once or not console.is_terminal:
            console.print(tables(client.stats(), console.width))
            return
        first = tables(client.stats(), console.width)
        with suppress(KeyboardInterrupt), Live(first, console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(tables(client.stats(), console.width), refresh=True)


def tables(stats: admin_pb2.Stats, width: int) -> Group:
    """Tables of engines and detokenizers. The engines' models are shown if they differ."""
    models = {engine.model_fingerprint for engine in stats.engines}
    mixed = [_mixed(len(models), stats.serving_model_fingerprint)] if len(models) > 1 else []
    columns = [*shown_columns(COLUMNS, width), *([Column("model", _model, right=False)] if mixed else [])]
    return Group(*mixed, table(columns, stats.engines), detokenizers_table(stats))


def _mixed(models: int, serving: str) -> str:
    targets = f"engines with model {serving[:MODEL_WIDTH]}" if serving else "all engines"
    return f"The engines serve {models} different models; new requests go to {targets}."


def detokenizers_table(stats: admin_pb2.Stats) -> Table:
    return table(DETOKENIZER_COLUMNS, stats.detokenizers)


def _host_blocks(engine: admin_pb2.EngineStats) -> str:
    return f"{engine.used_host_blocks} of {engine.max_host_blocks}" if engine.max_host_blocks else ""


def _model(engine: admin_pb2.EngineStats) -> str:
    return escape(f"{engine.model_fingerprint[:MODEL_WIDTH]} {engine.model_version}".rstrip())
