"""The ring's keys as Secrets of Kubernetes: NAME-key-ROLE for each role, and NAME-key-public for all services."""

import re
from collections.abc import Mapping
from typing import Any

import zmq

from sluice.ring.keys import ROLES, Role, newest_of_two

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = "sluice/key"
"""Its value is the role, or PUBLIC."""
PUBLIC = "public"

Secret = dict[str, Any]
PublicKeys = Mapping[Role, tuple[bytes, ...]]


def new_secrets(name: str, namespace: str | None) -> list[Secret]:
    """Of all roles."""
    pairs = {role: zmq.curve_keypair() for role in ROLES}
    public = {role: (pair[0],) for role, pair in pairs.items()}
    own = [_secret(name, namespace, role, {role: (pair[1],)}) for role, pair in pairs.items()]
    return [_secret(name, namespace, PUBLIC, public), *own]


def rotated_secrets(name: str, namespace: str | None, role: Role, public: PublicKeys) -> list[Secret]:
    """The two that change with a new key of this role. `public`: of all roles, now; the former key stays valid."""
    new, own = zmq.curve_keypair()
    return [
        _secret(name, namespace, PUBLIC, {**public, role: (new, *public[role][:1])}),
        _secret(name, namespace, role, {role: (own,)}),
    ]


def retired_secret(name: str, namespace: str | None, role: Role, public: PublicKeys) -> Secret:
    """The public keys without the former one of this role. `public`: of all roles, now. Raises KeysError."""
    newest = newest_of_two(public[role], f"{role}.key")
    return _secret(name, namespace, PUBLIC, {**public, role: (newest,)})


def _secret(name: str, namespace: str | None, what: str, keys: PublicKeys) -> Secret:
    labels = {"app.kubernetes.io/name": "sluice", LABEL: what}
    place = {} if namespace is None else {"namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-key-{what}", **place, "labels": labels},
        "type": "Opaque",
        # One key a line, as in the files that these items become.
        "stringData": {f"{role}.key": b"\n".join(lines).decode() for role, lines in keys.items()},
    }
