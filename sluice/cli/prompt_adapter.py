"""`sluice prompt-adapter`: the tuned prompts that requests can name."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from sluice.cli.common import Server, asks_server
from sluice.cli.each_router import UploadFolder, adapter_table, print_lists, report, source
from sluice.cli.health import TIMEOUT_SECONDS
from sluice.client import PromptAdapter, RouterPromptAdapters

PromptAdapterId = Annotated[str, typer.Argument(metavar="ID", help="The name under which requests use it")]

prompt_adapter = typer.Typer(no_args_is_help=True)


@prompt_adapter.callback()
def group() -> None:
    """Prompt adapters: load, unload and list them, at every router in --address."""


@prompt_adapter.command()
@asks_server
def load(
    server: Server,
    prompt_adapter_id: PromptAdapterId,
    path: Annotated[str | None, typer.Argument(help="Folder on the routers' machines")] = None,
    upload: UploadFolder = None,
) -> None:
    """Load the rows of prompt tuning, as peft saves them. Exit code 1 if a router failed."""
    with server.client(timeout=TIMEOUT_SECONDS) as client, source(path, upload, "routers"):
        found = client.load_prompt_adapter(prompt_adapter_id, path=path, folder=upload)
    _report(found, "loaded")


@prompt_adapter.command()
@asks_server
def unload(server: Server, prompt_adapter_id: PromptAdapterId) -> None:
    """Forget a prompt adapter; requests that have begun keep it. Exit code 1 if a router failed."""
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        _report(client.unload_prompt_adapter(prompt_adapter_id), f"{prompt_adapter_id} unloaded")


@prompt_adapter.command("list")
@asks_server
def list_prompt_adapters(server: Server) -> None:
    """List them; if routers know different ones, those of each. Exit code 1 if a router failed."""
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        found = client.list_prompt_adapters()
    print_lists([(each.address, each.prompt_adapters, each.error) for each in found], _table)


def _report(found: Sequence[RouterPromptAdapters], done: str) -> None:
    report([(each.address, [_line(adapter) for adapter in each.prompt_adapters], each.error) for each in found], done)


def _line(found: PromptAdapter) -> str:
    return f"{found.prompt_adapter_id}, {found.rows} rows, version {found.version},"


def _table(found: Sequence[PromptAdapter]) -> Table:
    return adapter_table("rows", [(each.prompt_adapter_id, each.rows, each.version, each.path) for each in found])
