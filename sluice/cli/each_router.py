"""What each router of --address has answered, where a command asks all of them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import typer
from rich.console import Console, RenderableType

from sluice.cli.common import describe, print_error
from sluice.cli.health import FILE_WIDTH
from sluice.client import SluiceError

T = TypeVar("T")


def report(answers: Sequence[tuple[str, Sequence[str], SluiceError | None]], done: str) -> None:
    """A line of each (address, what was done, error). Raises typer.Exit if a router failed."""
    for address, lines, error in answers:
        if error is None:
            print(f"{address}: {' '.join([*lines, done])}")
    _check([(address, error) for address, _, error in answers])


def print_lists(
    answers: Sequence[tuple[str, tuple[T, ...], SluiceError | None]], table: Callable[[Sequence[T]], RenderableType]
) -> None:
    """The items of each (address, items, error), once if all are the same. Raises typer.Exit if a router failed."""
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
        print_error(f"{address}: {describe(error, address)}")
    if failed:
        raise typer.Exit(1)
