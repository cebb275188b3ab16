"""`sluice keygen`: the keys by which the services of a ring authenticate each other."""

from pathlib import Path
from typing import Annotated, get_args

import typer
import yaml

from sluice.cli.common import fail
from sluice.cli.key_secrets import NAME, Secret, new_secrets, rotated_secrets
from sluice.cli.kubernetes_api import Cluster, ClusterError
from sluice.ring.keys import ROLES, KeysError, Role, generate, has_key, public_keys


def keygen(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder for the keys: FOLDER/secret and FOLDER/public", show_default=False)
    ] = None,
    rotate: Annotated[
        str | None, typer.Option(metavar="ROLE", help=f"Replace the key of one role: {', '.join(get_args(Role))}")
    ] = None,
    kubernetes: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print Secrets NAME-key-… for kubectl apply, instead of files")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Of the Secrets; default: that of kubectl, or of the pod")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Present public keys, for --kubernetes --rotate")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="In a pod: create the Secrets instead of printing")] = False,
) -> None:
    """Create the keys of a ring, a pair per role. A service needs its own secret/ROLE.key and all of public/."""
    if rotate is not None and rotate not in ROLES:
        raise fail(f"--rotate must be {', '.join(ROLES)}, not {rotate}")
    if (folder is None) == (kubernetes is None):
        raise fail("give either a FOLDER or --kubernetes NAME")
    if folder is not None:
        if namespace is not None or source is not None or create:
            raise fail("--namespace, --from and --create need --kubernetes NAME in place of a FOLDER")
        _write_files(folder, rotate)
    elif kubernetes is not None:
        secrets = _secrets(kubernetes, namespace, rotate, source)
        if create and rotate is not None:
            raise fail("--create makes the first keys; to rotate one, pass what is printed to kubectl apply")
        if create:
            _create(secrets)
        else:
            print(yaml.safe_dump_all(secrets, sort_keys=False), end="")


def _write_files(folder: Path, rotate: str | None) -> None:
    roles = [role for role in ROLES if rotate in (None, role)]
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


def _secrets(name: str, namespace: str | None, rotate: str | None, source: Path | None) -> list[Secret]:
    if not NAME.fullmatch(name):
        raise fail(f"--kubernetes must be lower-case letters, digits and -, 63 at most (got {name!r})")
    if (rotate is None) != (source is None):
        raise fail("--rotate ROLE and --from FOLDER go together: a new key is added to the public ones of now")
    if source is None:
        return new_secrets(name, namespace)
    try:
        public = public_keys(source)
    except KeysError as error:
        raise fail(str(error)) from error
    return rotated_secrets(name, namespace, next(role for role in ROLES if role == rotate), public)


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
                raise fail(f"{secret['metadata']['name']} has just been created by somebody else: try again")
    except ClusterError as error:
        raise fail(str(error)) from error
    for name in names:
        print(f"{name} exists and was left as it is" if existing else f"{name} created")
