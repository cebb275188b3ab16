"""`sluice keygen`: creates the keys with which the services of a ring authenticate each other."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import typer
import yaml

from sluice.cli.common import fail
from sluice.cli.key_secrets import NAME, Cluster, ClusterError, Secret, new_secrets, retired_secret, rotated_secrets
from sluice.lanes.keys import ROLES, KeysError, Role, generate, has_key, public_keys
from sluice.lanes.keys import retire as retire_key

Step = Literal["rotate", "retire"]


class Change(NamedTuple):
    """One step of a rotation."""

    step: Step
    role: Role


def keygen(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Folder to write the keys to: secret/ROLE.key and public/ROLE.key for each role.",
            show_default=False,
        ),
    ] = None,
    rotate: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE",
            help=f"Start a rotation: add a new key for this role ({', '.join(get_args(Role))}). The former public key "
            "stays valid.",
        ),
    ] = None,
    retire: Annotated[
        str | None,
        typer.Option(metavar="ROLE", help="Finish a rotation: remove the former public key of this role."),
    ] = None,
    kubernetes: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Print Kubernetes Secrets named NAME-key-… instead of writing files."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE",
            help="Namespace of the Secrets. Default: that of kubectl, with --create that of the pod.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Folder with the current public keys, for --rotate or --retire with --kubernetes.",
        ),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the Secrets instead of printing them. Only works in a pod.")
    ] = False,
) -> None:
    """Create or rotate the keys of a ring.

    Each role has a pair of keys. A service needs secret/ROLE.key of its role and the whole folder public/.
    """
    change = _change(rotate, retire)
    if (folder is None) == (kubernetes is None):
        raise fail("give either a FOLDER or --kubernetes NAME")
    if folder is not None:
        if namespace is not None or source is not None or create:
            raise fail("--namespace, --from and --create need --kubernetes NAME instead of a FOLDER")
        _write_files(folder, change)
    elif kubernetes is not None:
        secrets = _secrets(kubernetes, namespace, change, source)
        if not create:
            print(yaml.safe_dump_all(secrets, sort_keys=False), end="")
        elif change is None:
            _create(secrets)
        else:
            raise fail("--create only creates new keys; to rotate keys, pipe the printed Secrets to kubectl apply -f -")


def _change(rotate: str | None, retire: str | None) -> Change | None:
    if rotate is not None and retire is not None:
        raise fail("--rotate and --retire are separate steps: before --retire, distribute the new key to every service")
    name = retire if rotate is None else rotate
    if name is None:
        return None
    option: Step = "retire" if rotate is None else "rotate"
    role = next((role for role in ROLES if role == name), None)
    if role is None:
        raise fail(f"--{option} must be one of {', '.join(ROLES)} (got {name})")
    return Change(option, role)


def _write_files(folder: Path, change: Change | None) -> None:
    roles = ROLES if change is None else (change.role,)
    existing = [role for role in roles if has_key(folder, role)]
    if change is None and existing:
        raise fail(f"{folder} already has keys of {', '.join(existing)}; use --rotate ROLE to replace one")
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
        raise fail(f"--kubernetes must be 1 to 63 lower-case letters, digits and hyphens (got {name!r})")
    if change is None and source is None:
        return new_secrets(name, namespace)
    if change is None:
        raise fail("--from needs --rotate ROLE or --retire ROLE")
    if source is None:
        raise fail("with --kubernetes, --rotate and --retire need --from FOLDER, the folder of the current public keys")
    try:
        current = public_keys(source)
        if change.step == "retire":
            return [retired_secret(name, namespace, change.role, current)]
    except KeysError as error:
        raise fail(str(error)) from error
    return rotated_secrets(name, namespace, change.role, current)


def _create(secrets: list[Secret]) -> None:
    """Create all Secrets or none, because the keys of a ring belong together.

    A dry run shows which of them exist, so that the pod needs no permission other than to create Secrets.
    """
    try:
        cluster = Cluster()
        for secret in secrets:
            secret["metadata"].setdefault("namespace", cluster.namespace)
        names = {secret["metadata"]["name"]: cluster.create(secret, dry_run=True) for secret in secrets}
        existing = [name for name, missing in names.items() if not missing]
        if existing and len(existing) < len(names):
            missing = ", ".join(name for name in names if name not in existing)
            raise fail(
                f"{', '.join(existing)} exist and {missing} do not, but their keys belong together: restore the "
                f"missing Secrets, or run kubectl delete secret {' '.join(existing)} and try again"
            )
        for secret in [] if existing else secrets:
            if not cluster.create(secret):
                raise fail(f"{secret['metadata']['name']} has just been created by another process: try again")
    except ClusterError as error:
        raise fail(str(error)) from error
    for name in names:
        print(f"{name} exists already and was not changed" if existing else f"{name} created")
