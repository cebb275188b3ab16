"""The ring's keys as Kubernetes Secrets: NAME-key-ROLE for each role, and NAME-key-public for all services.

In a pod, they are created with its service account.
"""

import json
import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import zmq

from sluice.lanes.keys import ROLES, Role, newest_of_two

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = "sluice/key"
"""Label of each Secret. Its value is the role, or PUBLIC."""
PUBLIC = "public"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder into which Kubernetes mounts token, ca.crt and namespace."""
TIMEOUT_SECONDS = 30.0
CONFLICT = 409
"""HTTP status of a request to create an object that exists."""

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


class ClusterError(RuntimeError):
    """The API server cannot be reached, or refuses a request."""


class Cluster:
    """The API server of the cluster. Raises ClusterError outside of a pod, or in a pod without a service account."""

    def __init__(self) -> None:
        try:
            host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
            self.namespace = (ACCOUNT / "namespace").read_text().strip()
            self._token = (ACCOUNT / "token").read_text().strip()
            context = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
        except KeyError as error:
            raise ClusterError(f"--create works only in a pod of Kubernetes: {error.args[0]} is not set") from error
        except OSError as error:
            raise ClusterError(f"--create needs the service account of the pod: {error}") from error
        self._url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        # Ignores the environment's proxy, which is for addresses outside of the cluster.
        self._opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))

    def create(self, secret: Mapping[str, Any], dry_run: bool = False) -> bool:
        """Create a Secret. Returns False if one of that name exists, which is not changed. Raises ClusterError.

        `dry_run`: create nothing, only check.
        """
        query = urlencode({"fieldManager": "sluice", **({"dryRun": "All"} if dry_run else {})})
        namespace, name = (secret["metadata"][key] for key in ("namespace", "name"))
        request = Request(  # noqa: S310 - the scheme is https
            f"{self._url}/api/v1/namespaces/{namespace}/secrets?{query}",
            json.dumps(secret).encode(),
            {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS):
                return True
        except HTTPError as error:
            if error.code == CONFLICT:
                return False
            raise ClusterError(f"{self._url} refused to create Secret {name}: {_reason(error)}") from error
        except (URLError, OSError) as error:
            raise ClusterError(f"cannot reach {self._url}: {error}") from error


def _reason(error: HTTPError) -> str:
    """The message of the Status object in the API server's response."""
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {text[:200]}"
