"""`sluice serving-version`: the model version that new requests go to, at every router."""

from typing import Annotated

import typer

from sluice.cli.common import Server, asks_server, describe, fail, print_error
from sluice.cli.health import TIMEOUT_SECONDS
from sluice.client import ServingVersion


@asks_server
def serving_version(
    server: Server,
    version: Annotated[str | None, typer.Argument(help="model_version of the engines; default: only show it")] = None,
    any_version: Annotated[bool, typer.Option("--any", help="Send new requests to engines of any version")] = False,
) -> None:
    """Show or change the model version that new requests go to, a line for each router in --address.

    Streams that have begun stay with their model. Exit code 1 if a router failed.
    """
    if version == "" or (version is not None and any_version):
        raise fail(f"VERSION is {version!r}, must be a version, or --any without one")
    with server.client(timeout=TIMEOUT_SECONDS) as client:
        wanted = "" if any_version else version
        found = client.serving_versions() if wanted is None else client.set_serving_version(wanted)
    for each in found:
        if each.error is None:
            print(f"{each.address}: {_line(each)}")
        else:
            print_error(f"{each.address}: {describe(each.error, each.address)}")
    if any(each.error is not None for each in found):
        raise typer.Exit(1)


def _line(found: ServingVersion) -> str:
    version = found.version or "any"
    before = "" if found.former is None else f" (was {found.former or 'any'})"
    engines = f"{found.engines} engine{'' if found.engines == 1 else 's'}"
    if not found.engines and found.version:
        engines += " that take work: new requests go to other versions"
    return f"{version}{before}, {engines}"
