"""Prints the answers of several routers, for the commands about adapters, which call every router in --address."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from sluice.cli.common import describe_at, fail, print_error
from sluice.cli.health import FILE_WIDTH
from sluice.client import SluiceError

T = TypeVar("T")

UploadFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", exists=True, file_okay=False, help="Upload this local folder instead of using PATH."
    ),
]


@contextmanager
def source(path: str | None, upload: Path | None, machines: str) -> Iterator[None]:
    """Wraps the call that loads an adapter. Raises typer.Exit unless exactly one of both is given and can be read.

    `machines`: the services on whose machines `path` is a folder.
    """
    if (path is None) == (upload is None):
        raise fail(f"give either PATH, a folder on the {machines}' machines, or --upload FOLDER, a local folder")
    try:
        yield
    except (OSError, ValueError) as error:
        raise fail(f"--upload: {error}") from error


def adapter_table(size: str, rows: Sequence[tuple[str, int, str, str]]) -> Table:
    """`rows`: id, size, version and path of each adapter. `size`: heading of the second column."""
    table = Table(box=SIMPLE)
    for name in ("id", size, "version", "path"):
        table.add_column(name, justify="right" if name == size else "left")
    for adapter_id, number, version, path in rows:
        table.add_row(escape(adapter_id), str(number), version, escape(path) or "uploaded")
    return table


def report(answers: Sequence[tuple[str, Sequence[str], SluiceError | None]], done: str) -> None:
    """Print a line for each (address, adapters, error), ending with `done`. Raises typer.Exit if a router failed."""
    for address, lines, error in answers:
        if error is None:
            print(f"{address}: {' '.join([*lines, done])}")
    _check([(address, error) for address, _, error in answers])


def print_lists(
    answers: Sequence[tuple[str, tuple[T, ...], SluiceError | None]], table: Callable[[Sequence[T]], RenderableType]
) -> None:
    """Print the items of each (address, items, error), only once if all routers have the same ones.

    Raises typer.Exit if a router failed.
    """
    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else FILE_WIDTH
    answered = [(address, items) for address, items, error in answers if error is None]
    if len({items for _, items in answered}) == 1:
        console.print(table(answered[0][1]))
    else:
        for address, items in answered:
            console.print(f"{address}:", markup=False)
            console.print(table(items))
    _check([(address, error) for address, _, error in answers])


def _check(errors: Sequence[tuple[str, SluiceError | None]]) -> None:
    failed = [(address, error) for address, error in errors if error is not None]
    for address, error in failed:
        print_error(describe_at(error, address))
    if failed:
        raise typer.Exit(1)
