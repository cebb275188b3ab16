"""`sluice prompt-adapter`: loads, unloads and lists prompt adapters."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from sluice.cli.common import Server, with_server
from sluice.cli.each_router import UploadFolder, adapter_table, print_lists, report, source
from sluice.cli.health import TIMEOUT_SECONDS
from sluice.client import PromptAdapter, RouterPromptAdapters

PromptAdapterId = Annotated[str, typer.Argument(metavar="ID", help="Id by which requests refer to the prompt adapter.")]

prompt_adapter = typer.Typer(no_args_is_help=True)


@prompt_adapter.callback()
def group() -> None:
    """Load, unload and list prompt adapters.

    Each command applies to every router in --address.
    """


@prompt_adapter.command()
@with_server
def load(
    server: Server,
    prompt_adapter_id: PromptAdapterId,
    path: Annotated[
        str | None,
        typer.Argument(metavar="PATH", help="Folder on the routers' machines, in their prompt_adapter_folders."),
    ] = None,
    upload: UploadFolder = None,
) -> None:
    """Load a prompt adapter.

    The folder contains the result of prompt tuning, as peft saves it. Exits with code 1 if a router failed.
    """
    with server.client(timeout=TIMEOUT_SECONDS) as client, source(path, upload, "routers"):
        answers = client.load_prompt_adapter(prompt_adapter_id, path=path, folder=upload)
    _report(answers, "loaded")


@prompt_adapter.command()
@with_server
def unload(server: Server, prompt_adapter_id: PromptAdapterId) -> None:
    """Unload a prompt adapter.

    Requests in progress finish with it. Exits with code 1 if a router failed.
    """
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        _report(client.unload_prompt_adapter(prompt_adapter_id), f"{prompt_adapter_id} unloaded")


@prompt_adapter.command("list")
@with_server
def list_prompt_adapters(server: Server) -> None:
    """List the prompt adapters.

    If the routers' lists differ, each is printed. Exits with code 1 if a router failed.
    """
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        answers = client.list_prompt_adapters()
    print_lists([(answer.address, answer.prompt_adapters, answer.error) for answer in answers], _table)


def _report(answers: Sequence[RouterPromptAdapters], done: str) -> None:
    report(
        [(answer.address, [_line(adapter) for adapter in answer.prompt_adapters], answer.error) for answer in answers],
        done,
    )


def _line(adapter: PromptAdapter) -> str:
    return f"{adapter.prompt_adapter_id}, {adapter.rows} rows, version {adapter.version},"


def _table(adapters: Sequence[PromptAdapter]) -> Table:
    rows = [(adapter.prompt_adapter_id, adapter.rows, adapter.version, adapter.path) for adapter in adapters]
    return adapter_table("rows", rows)
