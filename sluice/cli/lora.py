"""`sluice lora`: loads, unloads and lists LoRA adapters."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from sluice.cli.common import Server, with_server
from sluice.cli.each_router import UploadFolder, adapter_table, print_lists, report, source
from sluice.cli.health import TIMEOUT_SECONDS
from sluice.client import Lora, RouterLoras

LoraId = Annotated[str, typer.Argument(metavar="ID", help="Id by which requests refer to the adapter.")]
LOAD_SECONDS = 360.0
"""Timeout of `load`. Longer than a router waits for its engines."""

lora = typer.Typer(no_args_is_help=True)


@lora.callback()
def group() -> None:
    """Load, unload and list LoRA adapters.

    Each command applies to every router in --address.
    """


@lora.command()
@with_server
def load(
    server: Server,
    lora_id: LoraId,
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="Folder on the engines' machines, in their lora_folders.")
    ] = None,
    upload: UploadFolder = None,
) -> None:
    """Load an adapter on every engine.

    The folder contains adapter_config.json and the weights, as peft saves them. Exits with code 1 if a router failed.
    """
    with server.client(timeout=LOAD_SECONDS) as client, source(path, upload, "engines"):
        answers = client.load_lora(lora_id, path=path, folder=upload)
    _report(answers, "loaded")


@lora.command()
@with_server
def unload(server: Server, lora_id: LoraId) -> None:
    """Unload an adapter.

    Requests in progress finish with it. Exits with code 1 if a router failed.
    """
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        _report(client.unload_lora(lora_id), f"{lora_id} unloaded")


@lora.command("list")
@with_server
def list_loras(server: Server) -> None:
    """List the adapters.

    If the routers' lists differ, each is printed. Exits with code 1 if a router failed.
    """
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        answers = client.list_loras()
    print_lists([(answer.address, answer.loras, answer.error) for answer in answers], _table)


def _report(answers: Sequence[RouterLoras], done: str) -> None:
    report([(answer.address, [_line(lora) for lora in answer.loras], answer.error) for answer in answers], done)


def _line(lora: Lora) -> str:
    return f"{lora.lora_id}, rank {lora.rank}, version {lora.version},"


def _table(loras: Sequence[Lora]) -> Table:
    return adapter_table("rank", [(lora.lora_id, lora.rank, lora.version, lora.path) for lora in loras])
