"""The options for connecting to a server: address, TLS, token and tenant."""

import shutil
import threading
from functools import partial
from socketserver import StreamRequestHandler, ThreadingTCPServer

import grpc
import pytest
from typer.testing import CliRunner

from sluice import Client
from sluice.cli.commands import app
from tests.fakes.breaking_routers import GONE, Plan, run_router, run_routers
from tests.fakes.certificates import Authority
from tests.fakes.server import serve
from tests.fakes.server_script import Script

UNREACHABLE = "127.0.0.1:1"


@pytest.mark.parametrize("command", [["generate", "x"], ["stats"], ["chat"]])
def test_one_available_router_of_several_is_enough(sluice, address, command) -> None:
    for addresses in (f"{UNREACHABLE},{address}", f"{address}, {UNREACHABLE}"):
        result = sluice(*command, "--address", addresses, stdin="")
        assert (result.exit_code, result.stderr) == (0, "")


def test_a_stream_continues_at_the_next_router() -> None:
    plan = Plan()
    with run_routers(2, plan) as addresses:
        run = ["generate", "x", "--max-tokens", "9", "--address", ",".join(addresses)]
        expected = CliRunner().invoke(app, run).stdout
        plan.breaks.append((4, GONE))
        broken = CliRunner().invoke(app, run)
    assert (broken.exit_code, broken.stdout, broken.stderr) == (0, expected, "")
    assert len(expected) > 5
    assert len(plan.seen) == 3


def test_no_server_at_any_address(sluice) -> None:
    result = sluice("generate", "x", "--address", "127.0.0.1:1,127.0.0.1:2")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no Sluice server answers at 127.0.0.1:1 or 127.0.0.1:2 (")


def test_the_port_of_a_gateway_is_recognized(sluice) -> None:
    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = sluice("generate", "x", "--address", f"127.0.0.1:{server.server_address[1]}")
        server.shutdown()
    assert result.exit_code == 1
    assert "does not speak HTTP/2, so it may be the port of a gateway or of metrics: use the" in result.stderr


def test_a_stream_without_a_server_is_reported_once_and_ends_as_interrupted(sluice, monkeypatch) -> None:
    plan = Plan()
    monkeypatch.setattr("sluice.client.retries.LONG_WAIT_SECONDS", 0.1)
    with run_router(0, plan) as (address, server):

        def die(_) -> None:
            server.stop(None).wait()
            # The call must not end before its connection.
            threading.Event().wait(0.1)

        plan.breaks.append((4, die))
        monkeypatch.setattr("sluice.cli.common.Client", partial(Client, resume_timeout=1.0))
        result = sluice("generate", "x", "--max-tokens", "9", "--address", address)
    assert result.exit_code == 1
    assert result.stdout.strip()
    waits, ends = result.stderr.splitlines()
    assert waits == f"no router at {address} accepts calls now; waiting up to 1 s (Ctrl-C ends)"
    assert ends.startswith(f"error: the call to {address} was interrupted: the connection was lost, and no router has ")
    assert ends.endswith("(Connection refused)")


def test_health_shows_every_router(sluice, address) -> None:
    with serve(Script()) as second_address:
        result = sluice("health", "--address", f"{address},{second_address}")
        assert result.exit_code == 0
        assert f"{address} serves tiny" in result.stdout
        assert f"{second_address} serves tiny" in result.stdout
    result = sluice("health", "--address", f"{UNREACHABLE},{address}")
    assert result.exit_code == 1
    assert f"{address} serves tiny" in result.stdout
    assert f"no Sluice server answers at {UNREACHABLE}" in result.stderr


def test_token_and_tenant(script, address) -> None:
    run = ["generate", "x", "--address", address]
    assert CliRunner().invoke(app, run, env={"SLUICE_TOKEN": "s3cret", "SLUICE_TENANT": "acme"}).exit_code == 0
    assert CliRunner().invoke(app, [*run, "--token", "s3cret", "--tenant", "acme"]).exit_code == 0
    for metadata in script.metadata:
        assert (metadata["authorization"], metadata["x-sluice-tenant"]) == ("Bearer s3cret", "acme")
    assert len(script.metadata) == 2
    result = CliRunner().invoke(app, [*run, "--token", "two words"])
    assert (result.exit_code, result.stderr) == (
        1,
        "error: token must be one or more printable ASCII characters other than spaces\n",
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls(tmp_path) -> None:
    authority = Authority(tmp_path, "authority")
    server, client = authority.issue("server"), authority.issue("client")
    pair = (server.key.read_bytes(), server.certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], authority.certificate.read_bytes(), True)
    with run_router(0, Plan(), credentials) as (address, _):
        run = ["generate", "x", "--max-tokens", "5", "--address", address, "--tls-ca", str(authority.certificate)]
        mutual = ["--tls-cert", str(client.certificate), "--tls-key", str(client.key)]
        assert CliRunner().invoke(app, [*run, *mutual]).exit_code == 0
        refused = CliRunner().invoke(app, run)
        assert refused.exit_code == 1
        assert "may require a client certificate: --tls-cert and --tls-key" in " ".join(refused.stderr.split())
        half = CliRunner().invoke(app, [*run, *mutual[:2]])
        assert (half.exit_code, half.stderr.startswith("error: --tls-cert and --tls-key")) == (1, True)
