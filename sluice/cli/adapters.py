"""`sluice lora` and `sluice prompt-adapter`: load, unload and list adapters at every router in --address."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from sluice.cli.common import TIMEOUT_SECONDS, Server, check_answers, fail, stdout_console, with_server
from sluice.top.panels import Column, table

LORA_SECONDS = 360.0
"""Timeout of `sluice lora load`. Longer than a router waits for its engines."""
FAILURES = "Exits with code 1 if a router failed."

UploadFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", exists=True, file_okay=False, help="Upload this local folder instead of using PATH."
    ),
]
Row = tuple[str, int, str, str]
"""An adapter: id, size, version and path."""


@dataclass(frozen=True)
class Kind:
    """What differs between the commands of LoRA adapters and of prompt adapters."""

    title: str
    article: str
    name: str
    where: str
    """Where `load` loads an adapter, in the words of its help. May be empty."""
    folder: str
    """What the folder of an adapter contains."""
    machines: str
    """The services on whose machines PATH is a folder."""
    folders: str
    """The setting of these services that lists the folders that they may read."""
    field: str
    """Its name in the client's attributes; with an "s" for several adapters."""
    size: str
    """Column heading of an adapter's size, and the name of that attribute in the client's results."""
    size_text: str
    """How `load` prints the size."""
    load_seconds: float

    def rows(self, answer: Any) -> list[Row]:
        """The adapters in a router's answer."""
        adapters = getattr(answer, f"{self.field}s")
        return [
            (getattr(each, f"{self.field}_id"), getattr(each, self.size), each.version, each.path) for each in adapters
        ]


def _commands(kind: Kind) -> typer.Typer:
    group = typer.Typer(
        no_args_is_help=True,
        help=f"Load, unload and list {kind.title}.\n\nEach command applies to every router in --address.",
    )
    one = f"{kind.article} {kind.name}"
    group.command("load", help=f"Load {one}{kind.where}.\n\nThe folder contains {kind.folder}. {FAILURES}")(_load(kind))
    group.command("unload", help=f"Unload {one}.\n\nRequests in progress finish with it. {FAILURES}")(_unload(kind))
    differ = "If the routers' lists differ, each is printed."
    group.command("list", help=f"List the {kind.name}s.\n\n{differ} {FAILURES}")(_list(kind))
    return group


def _load(kind: Kind) -> Callable[..., None]:
    path_help = f"Folder on the {kind.machines}' machines, in their {kind.folders}."

    @with_server
    def load(
        server: Server,
        adapter_id: Annotated[str, _id_argument(kind)],
        path: Annotated[str | None, typer.Argument(metavar="PATH", help=path_help)] = None,
        upload: UploadFolder = None,
    ) -> None:
        with server.client(timeout=kind.load_seconds) as client, _source(path, upload, kind.machines):
            answers = getattr(client, f"load_{kind.field}")(adapter_id, path=path, folder=upload)
        for answer in answers:
            for loaded_id, size, version, _ in kind.rows(answer):
                size_text = kind.size_text.format(size)
                print(f"{answer.address}: {loaded_id}, {size_text}, version {version}, loaded")
        check_answers(answers)

    return load


def _unload(kind: Kind) -> Callable[..., None]:
    @with_server
    def unload(server: Server, adapter_id: Annotated[str, _id_argument(kind)]) -> None:
        with server.client(timeout=TIMEOUT_SECONDS) as client:
            answers = getattr(client, f"unload_{kind.field}")(adapter_id)
        for answer in answers:
            if answer.error is None:
                print(f"{answer.address}: {adapter_id} unloaded")
        check_answers(answers)

    return unload


def _list(kind: Kind) -> Callable[..., None]:
    @with_server
    def list_adapters(server: Server) -> None:
        with server.client(timeout=TIMEOUT_SECONDS) as client:
            answers = getattr(client, f"list_{kind.field}s")()
        _print_lists([(answer.address, kind.rows(answer)) for answer in answers if answer.error is None], kind.size)
        check_answers(answers)

    return list_adapters


def _id_argument(kind: Kind) -> Any:
    return typer.Argument(metavar="ID", help=f"Id by which requests refer to the {kind.name}.")


@contextmanager
def _source(path: str | None, upload: Path | None, machines: str) -> Iterator[None]:
    """Wraps the call that loads an adapter. Raises typer.Exit unless exactly one of both is given and can be read."""
    if (path is None) == (upload is None):
        raise fail(f"give either PATH, a folder on the {machines}' machines, or --upload FOLDER, a local folder")
    try:
        yield
    except (OSError, ValueError) as error:
        raise fail(f"--upload: {error}") from error


def _print_lists(lists: Sequence[tuple[str, Sequence[Row]]], size: str) -> None:
    """Print the list of each address, or a single list if all are the same."""
    console = stdout_console()
    columns = (
        Column("id", lambda row: escape(row[0]), right=False),
        Column(size, lambda row: str(row[1])),
        Column("version", lambda row: row[2], right=False),
        Column("path", lambda row: escape(row[3]) or "uploaded", right=False),
    )
    if lists and all(rows == lists[0][1] for _, rows in lists):
        console.print(table(columns, lists[0][1]))
        return
    for address, rows in lists:
        console.print(f"{address}:", markup=False)
        console.print(table(columns, rows))


lora = _commands(
    Kind(
        title="LoRA adapters",
        article="an",
        name="adapter",
        where=" on every engine",
        folder="adapter_config.json and the weights, as peft saves them",
        machines="engines",
        folders="lora_folders",
        field="lora",
        size="rank",
        size_text="rank {}",
        load_seconds=LORA_SECONDS,
    )
)
prompt_adapter = _commands(
    Kind(
        title="prompt adapters",
        article="a",
        name="prompt adapter",
        where="",
        folder="the result of prompt tuning, as peft saves it",
        machines="routers",
        folders="prompt_adapter_folders",
        field="prompt_adapter",
        size="rows",
        size_text="{} rows",
        load_seconds=TIMEOUT_SECONDS,
    )
)
