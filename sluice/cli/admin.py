"""`sluice call`, `sluice cache-events` and `sluice serving-version`: what operators call through AdminService."""

import json
from contextlib import suppress
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict

from sluice.cli.common import TIMEOUT_SECONDS, Server, check_answers, fail, print_error, with_server
from sluice.client import ServingVersion


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


@with_server
def cache_events(
    server: Server,
    engine: Annotated[str, typer.Option(metavar="ID", help="Only follow this engine. Default: all engines.")] = "",
) -> None:
    """Follow the changes of the engines' prefix caches.

    Prints one JSON object per line for each change, until Ctrl-C. Engines record changes only if their setting
    kv_event_buffer is above 0.
    """
    with server.client() as client, suppress(KeyboardInterrupt), client.stream_cache_events(engine) as responses:
        for response in responses:
            for event in response.events:
                fields = MessageToDict(event, preserving_proto_field_name=True)
                print(json.dumps({"engine": response.engine_id, **fields}), flush=True)


@with_server
def serving_version(
    server: Server,
    version: Annotated[
        str | None,
        typer.Argument(
            metavar="VERSION",
            help="Send new requests to engines with this model_version. Default: only show the current version.",
        ),
    ] = None,
    any_version: Annotated[bool, typer.Option("--any", help="Send new requests to engines of any version.")] = False,
) -> None:
    """Show or set the model version for new requests.

    Applies to every router in --address and prints one line for each. Streams in progress keep their model. Exits with
    code 1 if a router failed.
    """
    if version == "":
        raise fail("VERSION must not be empty; use --any for any version")
    if version is not None and any_version:
        raise fail(f"VERSION and --any cannot be combined (got {version!r})")
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        new_version = "" if any_version else version
        answers = client.serving_versions() if new_version is None else client.set_serving_version(new_version)
    for answer in answers:
        if answer.error is None:
            print(f"{answer.address}: {_line(answer)}")
    check_answers(answers)


def _line(answer: ServingVersion) -> str:
    version = answer.version or "any"
    former = "" if answer.former is None else f" (was {answer.former or 'any'})"
    engines = f"{answer.engines} engine{'' if answer.engines == 1 else 's'}"
    if not answer.engines and answer.version:
        engines += " that accept work: new requests go to other versions"
    return f"{version}{former}, {engines}"
