"""`sluice keygen`: the keys by which the services of a ring authenticate each other."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import typer
import yaml

from sluice.cli.common import fail
from sluice.cli.key_secrets import NAME, Secret, new_secrets, retired_secret, rotated_secrets
from sluice.cli.kubernetes_api import Cluster, ClusterError
from sluice.ring.keys import ROLES, KeysError, Role, generate, has_key, public_keys
from sluice.ring.keys import retire as retire_key

Step = Literal["rotate", "retire"]


class Change(NamedTuple):
    """One end of a rotation."""

    step: Step
    role: Role


def keygen(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder for the keys: FOLDER/secret and FOLDER/public", show_default=False)
    ] = None,
    rotate: Annotated[
        str | None, typer.Option(metavar="ROLE", help=f"Replace the key of one role: {', '.join(get_args(Role))}")
    ] = None,
    retire: Annotated[
        str | None, typer.Option(metavar="ROLE", help="End a rotation: the former public key of this role is removed")
    ] = None,
    kubernetes: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print Secrets NAME-key-… for kubectl apply, instead of files")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Of the Secrets; default: that of kubectl, or of the pod")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Present public keys, to change with --kubernetes")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="In a pod: create the Secrets instead of printing")] = False,
) -> None:
    """Create the keys of a ring, a pair per role. A service needs its own secret/ROLE.key and all of public/."""
    change = _change(rotate, retire)
    if (folder is None) == (kubernetes is None):
        raise fail("give either a FOLDER or --kubernetes NAME")
    if folder is not None:
        if namespace is not None or source is not None or create:
            raise fail("--namespace, --from and --create need --kubernetes NAME in place of a FOLDER")
        _write_files(folder, change)
    elif kubernetes is not None:
        secrets = _secrets(kubernetes, namespace, change, source)
        if not create:
            print(yaml.safe_dump_all(secrets, sort_keys=False), end="")
        elif change is None:
            _create(secrets)
        else:
            raise fail("--create makes the first keys; to change them, pass what is printed to kubectl apply")


def _change(rotate: str | None, retire: str | None) -> Change | None:
    if rotate is not None and retire is not None:
        raise fail("--rotate and --retire are the two ends of a rotation: between them every service gets the new key")
    given = retire if rotate is None else rotate
    if given is None:
        return None
    option: Step = "retire" if rotate is None else "rotate"
    role = next((role for role in ROLES if role == given), None)
    if role is None:
        raise fail(f"--{option} must be {', '.join(ROLES)}, not {given}")
    return Change(option, role)


def _write_files(folder: Path, change: Change | None) -> None:
    roles = ROLES if change is None else (change.role,)
    known = [role for role in roles if has_key(folder, role)]
    if change is None and known:
        raise fail(f"{folder} already has keys of {', '.join(known)}; to replace one: --rotate ROLE")
    write = retire_key if change is not None and change.step == "retire" else generate
    try:
        for role in roles:
            write(folder, role)
    except (KeysError, OSError) as error:
        raise fail(str(error)) from error
    for role in roles:
        secret, public = (f"{folder / kind / role}.key" for kind in ("secret", "public"))
        print(public if write is retire_key else f"{secret}  {public}")


def _secrets(name: str, namespace: str | None, change: Change | None, source: Path | None) -> list[Secret]:
    if not NAME.fullmatch(name):
        raise fail(f"--kubernetes must be lower-case letters, digits and -, 63 at most (got {name!r})")
    if change is None and source is None:
        return new_secrets(name, namespace)
    if change is None or source is None:
        raise fail("--rotate ROLE or --retire ROLE and --from FOLDER go together: they change the public keys of now")
    try:
        public = public_keys(source)
        if change.step == "retire":
            return [retired_secret(name, namespace, change.role, public)]
    except KeysError as error:
        raise fail(str(error)) from error
    return rotated_secrets(name, namespace, change.role, public)


def _create(secrets: list[Secret]) -> None:
    """All of them or none: the keys of a ring belong together. To find out takes no more than the right to create."""
    try:
        cluster = Cluster()
        for secret in secrets:
            secret["metadata"].setdefault("namespace", cluster.namespace)
        names = {secret["metadata"]["name"]: cluster.create(secret, dry_run=True) for secret in secrets}
        existing = [name for name, missing in names.items() if not missing]
        if existing and len(existing) < len(names):
            missing = ", ".join(name for name in names if name not in existing)
            raise fail(
                f"{', '.join(existing)} exist and {missing} do not, but their keys belong together: "
                f"restore these, or kubectl delete secret {' '.join(existing)} and try again"
            )
        for secret in [] if existing else secrets:
            if not cluster.create(secret):
                raise fail(f"{secret['metadata']['name']} has just been created by another process: try again")
    except ClusterError as error:
        raise fail(str(error)) from error
    for name in names:
        print(f"{name} exists and was left as it is" if existing else f"{name} created")
