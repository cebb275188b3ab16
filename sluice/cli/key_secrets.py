"""The ring's keys as Kubernetes Secrets: NAME-key-ROLE for each role, and NAME-key-public for all services."""

import re
from collections.abc import Mapping
from typing import Any

import zmq

from sluice.lanes.keys import ROLES, Role, newest_of_two

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = "sluice/key"
"""Label of each Secret. Its value is the role, or PUBLIC."""
PUBLIC = "public"

Secret = dict[str, Any]
PublicKeys = Mapping[Role, tuple[bytes, ...]]


def new_secrets(name: str, namespace: str | None) -> list[Secret]:
    """The Secrets of a ring with new keys."""
    pairs = {role: zmq.curve_keypair() for role in ROLES}
    public_keys = {role: (public,) for role, (public, _) in pairs.items()}
    secrets = [_secret(name, namespace, role, {role: (secret,)}) for role, (_, secret) in pairs.items()]
    return [_secret(name, namespace, PUBLIC, public_keys), *secrets]


def rotated_secrets(name: str, namespace: str | None, role: Role, current: PublicKeys) -> list[Secret]:
    """The two Secrets that change with a new key of `role`. Its current public key stays valid as the second one."""
    public, secret = zmq.curve_keypair()
    return [
        _secret(name, namespace, PUBLIC, {**current, role: (public, *current[role][:1])}),
        _secret(name, namespace, role, {role: (secret,)}),
    ]


def retired_secret(name: str, namespace: str | None, role: Role, current: PublicKeys) -> Secret:
    """The Secret of the public keys without the former key of `role`. Raises KeysError."""
    newest = newest_of_two(current[role], f"{role}.key")
    return _secret(name, namespace, PUBLIC, {**current, role: (newest,)})


def _secret(name: str, namespace: str | None, suffix: str, keys: PublicKeys) -> Secret:
    """`suffix`: a role, or PUBLIC."""
    labels = {"app.kubernetes.io/name": "sluice", LABEL: suffix}
    in_namespace = {} if namespace is None else {"namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-key-{suffix}", **in_namespace, "labels": labels},
        "type": "Opaque",
        # One key per line, as in the key files that these items are mounted as.
        "stringData": {f"{role}.key": b"\n".join(lines).decode() for role, lines in keys.items()},
    }
