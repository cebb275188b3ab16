"""`sluice lora`: the LoRA adapters that requests can name."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from sluice.cli.common import Server, asks_server
from sluice.cli.each_router import UploadFolder, adapter_table, print_lists, report, source
from sluice.cli.health import TIMEOUT_SECONDS
from sluice.client import Lora, RouterLoras

LoraId = Annotated[str, typer.Argument(metavar="ID", help="The name under which requests use it")]
LOAD_SECONDS = 360.0
"""Longer than a router waits for its engines."""

lora = typer.Typer(no_args_is_help=True)


@lora.callback()
def group() -> None:
    """LoRA adapters: load, unload and list them, at every router in --address."""


@lora.command()
@asks_server
def load(
    server: Server,
    lora_id: LoraId,
    path: Annotated[str | None, typer.Argument(help="Folder on the engines' machines")] = None,
    upload: UploadFolder = None,
) -> None:
    """Load an adapter, as peft saves it, on every engine. Exit code 1 if a router failed."""
    with server.client(timeout=LOAD_SECONDS) as client, source(path, upload, "engines"):
        found = client.load_lora(lora_id, path=path, folder=upload)
    _report(found, "loaded")


@lora.command()
@asks_server
def unload(server: Server, lora_id: LoraId) -> None:
    """Forget an adapter; requests that have begun keep it. Exit code 1 if a router failed."""
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        _report(client.unload_lora(lora_id), f"{lora_id} unloaded")


@lora.command("list")
@asks_server
def list_loras(server: Server) -> None:
    """List the adapters; if routers know different ones, those of each. Exit code 1 if a router failed."""
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        found = client.list_loras()
    print_lists([(each.address, each.loras, each.error) for each in found], _table)


def _report(found: Sequence[RouterLoras], done: str) -> None:
    report([(each.address, [_line(lora) for lora in each.loras], each.error) for each in found], done)


def _line(found: Lora) -> str:
    return f"{found.lora_id}, rank {found.rank}, version {found.version},"


def _table(loras: Sequence[Lora]) -> Table:
    return adapter_table("rank", [(each.lora_id, each.rank, each.version, each.path) for each in loras])
