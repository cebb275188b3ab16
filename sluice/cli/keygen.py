"""`sluice keygen`: the keys by which the services of a ring know each other."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from sluice.cli.common import fail
from sluice.ring.keys import ROLES, KeysError, Role, generate, has_key


def keygen(
    folder: Annotated[Path, typer.Argument(help="Where the keys go: FOLDER/secret and FOLDER/public")],
    rotate: Annotated[
        str | None, typer.Option(metavar="ROLE", help=f"A new key for one role: {', '.join(get_args(Role))}")
    ] = None,
) -> None:
    """Make the keys of a ring, a pair for each role. A service needs secret/ROLE.key of its own and all of public/."""
    roles = [role for role in ROLES if rotate in (None, role)]
    if not roles:
        raise fail(f"--rotate must be {', '.join(ROLES)}, not {rotate}")
    known = [role for role in roles if has_key(folder, role)]
    if rotate is None and known:
        raise fail(f"{folder} holds keys of {', '.join(known)} already; a new one for a role: --rotate ROLE")
    try:
        for role in roles:
            generate(folder, role)
    except (KeysError, OSError) as error:
        raise fail(str(error)) from error
    for role in roles:
        print(f"{folder / 'secret' / role}.key  {folder / 'public' / role}.key")
