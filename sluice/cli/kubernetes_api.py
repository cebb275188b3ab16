"""Creates Secrets from within a cluster, with the service account of the pod."""

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
"""Where Kubernetes mounts token, ca.crt and namespace."""
SECONDS = 30.0
EXISTS = 409


class ClusterError(RuntimeError):
    """The API server cannot be reached, or refuses."""


class Cluster:
    """Raises ClusterError outside of a pod, or in one without a service account."""

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
        # Not through a proxy of the environment, which is for addresses outside of the cluster.
        self._opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))

    def create(self, secret: Mapping[str, Any], dry_run: bool = False) -> bool:
        """False if there is a Secret of that name; it stays as it is. `dry_run`: only find out."""
        query = urlencode({"fieldManager": "sluice", **({"dryRun": "All"} if dry_run else {})})
        namespace, name = (secret["metadata"][key] for key in ("namespace", "name"))
        request = Request(  # noqa: S310 - the scheme is https
            f"{self._url}/api/v1/namespaces/{namespace}/secrets?{query}",
            json.dumps(secret).encode(),
            {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        try:
            with self._opener.open(request, timeout=SECONDS):
                return True
        except HTTPError as error:
            if error.code == EXISTS:
                return False
            raise ClusterError(f"{self._url} refused to create Secret {name}: {_reason(error)}") from error
        except (URLError, OSError) as error:
            raise ClusterError(f"cannot reach {self._url}: {error}") from error


def _reason(error: HTTPError) -> str:
    """The message of the Status object that the API server sends."""
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {text[:200]}"
