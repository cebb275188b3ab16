"""`sluice prompt-adapter`: the tuned prompts that requests can name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from sluice.cli.common import Server, asks_server, fail
from sluice.cli.each_router import print_lists, report
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
    upload: Annotated[
        Path | None, typer.Option(metavar="FOLDER", exists=True, file_okay=False, help="Folder here, to be uploaded")
    ] = None,
) -> None:
    """Load the rows of prompt tuning, as peft saves them. Exit code 1 if a router failed."""
    if (path is None) == (upload is None):
        raise fail("give either PATH, a folder on the routers' machines, or --upload FOLDER")
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        try:
            found = client.load_prompt_adapter(prompt_adapter_id, path=path, folder=upload)
        except (OSError, ValueError) as error:
            raise fail(f"--upload: {error}") from error
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
    table = Table(box=SIMPLE)
    for name in ("id", "rows", "version", "path"):
        table.add_column(name, justify="right" if name == "rows" else "left")
    for each in found:
        table.add_row(escape(each.prompt_adapter_id), str(each.rows), each.version, escape(each.path) or "uploaded")
    return table
