"""`sluice keygen`: the keys by which the services of a ring authenticate each other."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from sluice.cli.common import fail
from sluice.ring.keys import ROLES, KeysError, Role, generate, has_key


def keygen(
    folder: Annotated[Path, typer.Argument(help="Folder for the keys: FOLDER/secret and FOLDER/public")],
    rotate: Annotated[
        str | None, typer.Option(metavar="ROLE", help=f"Replace the key of one role: {', '.join(get_args(Role))}")
    ] = None,
) -> None:
    """Create the keys of a ring, a pair per role. A service needs its own secret/ROLE.key and all of public/."""
    roles = [role for role in ROLES if rotate in (None, role)]
    if not roles:
        raise fail(f"--rotate must be {', '.join(ROLES)}, not {rotate}")
    known = [role for role in roles if has_key(folder, role)]
    if rotate is None and known:
        raise fail(f"{folder} already has keys of {', '.join(known)}; to replace one: --rotate ROLE")
    try:
        for role in roles:
            generate(folder, role)
    except (KeysError, OSError) as error:
        raise fail(str(error)) from error
    for role in roles:
        print(f"{folder / 'secret' / role}.key  {folder / 'public' / role}.key")
