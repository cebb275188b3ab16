"""Shared by the commands: options of a generation, one-line errors."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from sluice.client import SluiceError, Unavailable

MaxTokens = Annotated[int | None, typer.Option(help="Maximum number of new tokens; default: what fits the context")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the model's")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens; 0: from all")]
TopP = Annotated[float | None, typer.Option(help="Sample from the most likely tokens of this probability mass")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text")]


def notes() -> Console:
    """stderr, for everything but the command's result."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Print an error on one line."""
    notes().print(f"error: {' '.join(message.split())}", style="red", markup=False)


def fail(message: str) -> typer.Exit:
    """Print an error; the caller raises the result to exit with code 1."""
    print_error(message)
    return typer.Exit(1)


@contextmanager
def one_line_errors(address: str) -> Iterator[None]:
    """Turn a failed call into one line on stderr and exit code 1."""
    try:
        yield
    except SluiceError as error:
        raise fail(describe(error, address)) from error


def describe(error: SluiceError, address: str) -> str:
    """The error's message for people."""
    if isinstance(error, Unavailable) and not error.reason:
        cause = error.message.rsplit(": ", 1)[-1]
        return f"no Sluice server answers at {address} ({cause}); start one with: sluice serve"
    return error.message
