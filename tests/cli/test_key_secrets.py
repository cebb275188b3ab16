"""`sluice keygen --kubernetes`: the ring's keys as Secrets, printed or created through the Kubernetes API."""

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from sluice.cli import key_secrets
from sluice.cli.commands import app
from sluice.lanes.keys import ROLES, Keys, generate
from tests.fakes.certificates import Authority

NAMES = ["ring-key-public", "ring-key-router", "ring-key-engine", "ring-key-detok"]
TOKEN = "the-token"


def keygen(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keygen", *arguments])


def printed(*arguments: str) -> dict[str, dict]:
    result = keygen("--kubernetes", "ring", *arguments)
    assert result.exit_code == 0, result.stderr
    return {secret["metadata"]["name"]: secret for secret in yaml.safe_load_all(result.stdout)}


def mount(secrets: dict[str, dict], role: str, folder: Path) -> Path:
    """Write the Secrets to files as the chart mounts them into a pod of this role."""
    for subfolder, secret in (("secret", f"ring-key-{role}"), ("public", "ring-key-public")):
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
        for file, content in secrets[secret]["stringData"].items():
            (folder / subfolder / file).write_text(content)
            (folder / subfolder / file).chmod(0o440)
    return folder


class Api(BaseHTTPRequestHandler):
    """A Kubernetes API server that can only create Secrets."""

    secrets: dict[str, dict]
    allowed = True

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        secret = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = secret["metadata"]["name"]
        if self.headers["Authorization"] != f"Bearer {TOKEN}" or not self.allowed:
            self.answer(403, {"kind": "Status", "message": f'secrets "{name}" is forbidden'})
        elif url.path != f"/api/v1/namespaces/{secret['metadata']['namespace']}/secrets":
            self.answer(404, {})
        elif name in self.secrets:
            self.answer(409, {"kind": "Status", "message": f'secrets "{name}" already exists'})
        else:
            if "dryRun" not in parse_qs(url.query):
                self.secrets[name] = secret
            self.answer(201, secret)

    def answer(self, status: int, body: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Api]]:
    """A server, and the environment and service account of a pod that refer to it."""
    authority = Authority(tmp_path, "cluster")
    pair = authority.issue("api")
    handler = type("ThisApi", (Api,), {"secrets": {}})
    server = HTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text("llm")
    (tmp_path / "ca.crt").write_bytes(authority.certificate.read_bytes())
    monkeypatch.setattr(key_secrets, "ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_services_can_read_the_printed_secrets(tmp_path: Path) -> None:
    secrets = printed("--namespace", "llm")
    assert list(secrets) == NAMES
    assert {secret["metadata"]["namespace"] for secret in secrets.values()} == {"llm"}
    for role in ROLES:
        assert list(secrets[f"ring-key-{role}"]["stringData"]) == [f"{role}.key"]
        assert Keys(mount(secrets, role, tmp_path / role), role).own
    assert "namespace" not in printed()[NAMES[0]]["metadata"]


@pytest.mark.parametrize("flat", [False, True])
def test_a_rotated_role_has_a_new_key_and_its_former_key_stays_valid(tmp_path: Path, flat: bool) -> None:
    """The current keys are read from a folder of `keygen`, and from the public Secret as it is mounted."""
    for role in ROLES:
        generate(tmp_path / "keys", role)
    former = {role: Keys(tmp_path / "keys", role).own for role in ROLES}
    secrets = printed("--rotate", "engine", "--from", str(tmp_path / "keys" / ("public" if flat else "")))
    # Services must learn the new public key before it is used.
    assert list(secrets) == ["ring-key-public", "ring-key-engine"]
    keys = Keys(mount(secrets, "engine", tmp_path / "mounted"), "engine")
    assert keys.public("engine") == (keys.own.public, former["engine"].public)
    assert keys.public("router") == (former["router"].public,)


def test_a_rotation_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    for role in ROLES:
        generate(folder, role)
    refused = keygen("--kubernetes", "ring", "--retire", "engine", "--from", str(folder))
    assert refused.exit_code == 1
    assert "engine.key contains one key" in refused.stderr
    generate(folder, "engine")
    secrets = printed("--namespace", "llm", "--retire", "engine", "--from", str(folder))
    assert list(secrets) == ["ring-key-public"]
    assert secrets["ring-key-public"]["metadata"]["namespace"] == "llm"
    newest = {f"{role}.key": Keys(folder, role).own.public.decode() for role in ROLES}
    assert secrets["ring-key-public"]["stringData"] == newest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either a FOLDER or --kubernetes"),
        (["keys", "--kubernetes", "ring"], "either a FOLDER or --kubernetes"),
        (["keys", "--create"], "--create need --kubernetes"),
        (["--kubernetes", "Ring_1"], "'Ring_1'"),
        (["--kubernetes", "ring", "--rotate", "engine"], "--from FOLDER"),
        (["--kubernetes", "ring", "--retire", "engine"], "--from FOLDER"),
        (["--kubernetes", "ring", "--from", "keys"], "--from needs --rotate ROLE or --retire ROLE"),
        (["--kubernetes", "ring", "--rotate", "engine", "--from", "/nowhere"], "/nowhere/router.key"),
        (["--kubernetes", "ring", "--create"], "only in a pod of Kubernetes"),
    ],
)
def test_invalid_combinations_are_refused(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = keygen(*arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_pod_creates_the_secrets(api: type[Api], tmp_path: Path) -> None:
    result = keygen("--kubernetes", "ring", "--namespace", "llm", "--create")
    assert (result.exit_code, result.stdout.splitlines()) == (0, [f"{name} created" for name in NAMES])
    assert list(api.secrets) == NAMES
    for role in ROLES:
        assert Keys(mount(api.secrets, role, tmp_path / "pod" / role), role).own


def test_existing_secrets_are_not_changed(api: type[Api]) -> None:
    keygen("--kubernetes", "ring", "--create")
    secrets_before = dict(api.secrets)
    assert secrets_before[NAMES[0]]["metadata"]["namespace"] == "llm"
    result = keygen("--kubernetes", "ring", "--create")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [f"{name} exists already and was not changed" for name in NAMES]
    assert api.secrets == secrets_before


def test_an_incomplete_set_is_not_completed_with_new_keys(api: type[Api]) -> None:
    keygen("--kubernetes", "ring", "--create")
    del api.secrets["ring-key-engine"]
    result = keygen("--kubernetes", "ring", "--create")
    assert result.exit_code == 1
    assert "ring-key-engine do not" in " ".join(result.stderr.split())
    assert "ring-key-engine" not in api.secrets


def test_a_refusal_is_reported(api: type[Api]) -> None:
    api.allowed = False
    result = keygen("--kubernetes", "ring", "--create")
    assert result.exit_code == 1
    assert '"ring-key-public" is forbidden' in " ".join(result.stderr.split())


def test_an_unreachable_server_is_reported(api: type[Api], tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_bytes(Authority(tmp_path, "another").certificate.read_bytes())
    result = keygen("--kubernetes", "ring", "--create")
    assert result.exit_code == 1
    assert "cannot reach https://127.0.0.1:" in " ".join(result.stderr.split())
