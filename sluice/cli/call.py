"""`sluice call`: a method on every rank of every engine."""

import json
from typing import Annotated, Any

import typer

from sluice.cli.common import Server, asks_server, fail, print_error


@asks_server
def call(
    server: Server,
    method: Annotated[str, typer.Argument(help="Such as memory, ping or versions")],
    args: Annotated[str, typer.Option(help="Arguments: a JSON array, or an object for named ones")] = "[]",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for the engines to answer")] = 30.0,
) -> None:
    """Run a method on every rank of every engine, and print a line of JSON for each."""
    given = _read(args)
    positional, named = ((), given) if isinstance(given, dict) else (given, {})
    with server.client() as client:
        answers = client.call_engines(method, positional, named, timeout=timeout)
    for answer in answers:
        if answer.error is None:
            print(json.dumps({"engine": answer.engine_id, "rank": answer.rank, "value": answer.value}))
        else:
            print_error(answer.error)
    if any(answer.error is not None for answer in answers):
        raise typer.Exit(1)


def _read(args: str) -> list[Any] | dict[str, Any]:
    try:
        found = json.loads(args)
    except ValueError as error:
        raise fail(f"--args cannot be read as JSON: {error}") from error
    if not isinstance(found, list | dict):
        raise fail(f"--args must be a JSON array or object, is {args}")
    return found
