"""Shared by the commands: options of a generation, groups of options, one-line errors."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

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


def with_options(make: Callable[..., Any], name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: adds the parameters of `make` to a command's options and passes its result as the parameter `name`."""
    shared = inspect.signature(make).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**options: Any) -> None:
            made = make(**{each: options.pop(each) for each in shared})
            command(**{name: made}, **options)

        # typer reads a command's options from its signature and annotations.
        own = (each for each in inspect.signature(command).parameters.values() if each.name != name)
        parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in (*shared.values(), *own)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate
