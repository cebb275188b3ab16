"""`sluice call`: calls a method on every rank of every engine."""

import json
from typing import Annotated, Any

import typer

from sluice.cli.common import Server, fail, print_error, with_server


@with_server
def call(
    server: Server,
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="Name of the method, such as memory, ping or versions.")
    ],
    args: Annotated[
        str,
        typer.Option(metavar="JSON", help="Arguments: a JSON array, or a JSON object for keyword arguments."),
    ] = "[]",
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time to wait for the engines.")] = 30.0,
) -> None:
    """Call a method on every rank of every engine.

    Prints one JSON object per line for each rank. Exits with code 1 if the method failed on any rank.
    """
    arguments = _read(args)
    positional, keyword = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    with server.client() as client:
        answers = client.call_engines(method, positional, keyword, timeout=timeout)
    for answer in answers:
        if answer.error is None:
            print(json.dumps({"engine": answer.engine_id, "rank": answer.rank, "value": answer.value}))
        else:
            print_error(answer.error)
    if any(answer.error is not None for answer in answers):
        raise typer.Exit(1)


def _read(args: str) -> list[Any] | dict[str, Any]:
    try:
        arguments = json.loads(args)
    except ValueError as error:
        raise fail(f"--args is not valid JSON: {error}") from error
    if not isinstance(arguments, list | dict):
        raise fail(f"--args must be a JSON array or object (got {args})")
    return arguments
