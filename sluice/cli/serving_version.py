"""`sluice serving-version`: shows or sets the model version that every router sends new requests to."""

from typing import Annotated

import typer

from sluice.cli.common import Server, describe_at, fail, print_error, with_server
from sluice.cli.health import TIMEOUT_SECONDS
from sluice.client import ServingVersion


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
        else:
            print_error(describe_at(answer.error, answer.address))
    if any(answer.error is not None for answer in answers):
        raise typer.Exit(1)


def _line(answer: ServingVersion) -> str:
    version = answer.version or "any"
    former = "" if answer.former is None else f" (was {answer.former or 'any'})"
    engines = f"{answer.engines} engine{'' if answer.engines == 1 else 's'}"
    if not answer.engines and answer.version:
        engines += " that accept work: new requests go to other versions"
    return f"{version}{former}, {engines}"
