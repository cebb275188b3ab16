"""Creates Secrets from a pod, with its service account."""

import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder into which Kubernetes mounts token, ca.crt and namespace."""
TIMEOUT_SECONDS = 30.0
CONFLICT = 409
"""HTTP status of a request to create an object that exists."""


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
