"""TLS, mutual TLS, tokens and tenants of both clients."""

import asyncio
import shutil
from contextlib import closing

import grpc
import pytest
from prometheus_client import CollectorRegistry

from sluice import AsyncClient, Client
from sluice.client import Forbidden, TlsOptions, Unauthenticated, Unavailable, WrongServer, connection
from sluice.telemetry.pages import Page
from sluice.telemetry.probes import Health
from sluice.telemetry.server import StatusServer
from sluice.telemetry.service_status import ProgressBeacon
from tests.fakes.breaking_routers import Plan, run_router, with_reason
from tests.fakes.certificates import Authority
from tests.fakes.http2 import frozen_server


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    return Authority(tmp_path_factory.mktemp("certificates"), "authority")


def credentials(authority: Authority, mutual: bool) -> grpc.ServerCredentials:
    server = authority.issue("server")
    pair = (server.key.read_bytes(), server.certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], authority.certificate.read_bytes() if mutual else None, mutual)


async def test_tls(authority, tmp_path) -> None:
    stranger = Authority(tmp_path, "stranger")
    cases = (
        (TlsOptions(ca=stranger.certificate), r"authority in --tls-ca \(unable to get local issuer certificate\)"),
        (None, "may require TLS: --tls-ca FILE"),
    )
    with run_router(0, Plan(), credentials(authority, mutual=False)) as (address, _):
        tls = TlsOptions(ca=authority.certificate)
        with Client(address, tls=tls) as client:
            assert client.generate("p").text == "served by 0"
        async with AsyncClient(address, tls=tls) as client:
            assert [chunk async for chunk in client.stream("p")]
        for rejected, explanation in cases:
            with Client(address, tls=rejected) as client, pytest.raises(WrongServer, match=explanation):
                client.generate("p")


async def test_a_server_without_tls_or_without_http_2_is_recognized(authority) -> None:
    tls = TlsOptions(ca=authority.certificate)
    with (
        run_router(0, Plan()) as (address, _),
        Client(address, tls=tls) as client,
        pytest.raises(WrongServer, match=f"{address} does not answer with TLS"),
    ):
        client.health()
    health = Health(ProgressBeacon(), 120, 30, lambda: None)
    with closing(StatusServer(Page(CollectorRegistry(), health), "127.0.0.1", 0)) as metrics:
        address = f"127.0.0.1:{metrics.port}"
        message = f"{address} does not speak HTTP/2, so it may be the port of a gateway or of metrics"
        with Client(address) as client, pytest.raises(WrongServer, match=message):
            client.generate("p")
        async with AsyncClient(address) as client:
            with pytest.raises(WrongServer, match=message):
                await client.generate("p")
            with pytest.raises(WrongServer, match=message):
                _ = [chunk async for chunk in client.stream("p")]
            with pytest.raises(WrongServer, match=message):
                _ = [step async for step in client.stream_steps()]


async def test_mutual_tls(authority, tmp_path) -> None:
    known, stranger = authority.issue("client"), Authority(tmp_path, "strangers").issue("stranger")
    with run_router(0, Plan(), credentials(authority, mutual=True)) as (address, _):
        tls = TlsOptions(authority.certificate, known.certificate, known.key)
        with Client(address, tls=tls) as client:
            assert list(client.stream("p"))
        async with AsyncClient(address, tls=tls) as client:
            assert (await client.generate("p")).text == "served by 0"
        for rejected in (
            TlsOptions(authority.certificate),
            TlsOptions(authority.certificate, stranger.certificate, stranger.key),
        ):
            with Client(address, tls=rejected) as client, pytest.raises(Unavailable):
                client.generate("p")


def test_mutually_exclusive_options(authority, tmp_path) -> None:
    with pytest.raises(ValueError, match="certificate and key"):
        TlsOptions(certificate="a.pem")
    with pytest.raises(ValueError, match="give one"):
        Client(tls=TlsOptions(), credentials=grpc.ssl_channel_credentials())
    with pytest.raises(FileNotFoundError):
        Client(tls=TlsOptions(ca=tmp_path / "nothing.pem"))


async def test_a_misspelt_option_suggests_the_right_one() -> None:
    for client in (Client, AsyncClient):
        with pytest.raises(TypeError, match=r"unknown option 'tmeout'; did you mean 'timeout'\?"):
            client("localhost:1", tmeout=3)


async def test_token_and_tenant_are_sent_with_every_call() -> None:
    plan = Plan()
    with run_router(0, plan) as (address, _):
        options = {"token": "s3cret", "tenant": "acme", "metadata": (("x-trace", "1"),)}
        with Client(address, **options) as client:
            list(client.stream("p"))
        async with AsyncClient(address, **options) as client:
            assert [chunk async for chunk in client.stream("p")]
    for metadata in plan.metadata:
        expected = {"authorization": "Bearer s3cret", "x-sluice-tenant": "acme", "x-trace": "1"}
        assert expected.items() <= metadata.items()
    assert len(plan.metadata) == 2


@pytest.mark.parametrize("value", ["", "two words", "é", "line\nline"])
@pytest.mark.parametrize("name", ["token", "tenant"])
def test_an_invalid_token_is_not_in_the_error(name, value) -> None:
    with pytest.raises(ValueError, match=f"{name} must be") as caught:
        Client(**{name: value})
    assert not value or value not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, "FORBIDDEN", Forbidden),
    ],
)
def test_rejected_callers(code, reason, kind) -> None:
    plan = Plan()
    with run_router(0, plan) as (address, _), Client(address, retry_timeout=60) as client:
        for call in (lambda: client.generate("p"), lambda: list(client.stream("p"))):
            plan.breaks.append((0, with_reason(code, reason)))
            with pytest.raises(kind) as caught:
                call()
            assert not caught.value.retryable
    assert len(plan.seen) == 2


async def test_a_stopped_router_is_abandoned(monkeypatch) -> None:
    """The router's machine still acknowledges packets. With gRPC's defaults, calls would wait for a minute."""
    short_timeouts = {"grpc.keepalive_time_ms": 200, "grpc.http2.ping_timeout_ms": 200}
    options = dict(connection.CHANNEL_OPTIONS)
    assert options.keys() >= short_timeouts.keys()
    monkeypatch.setattr(connection, "CHANNEL_OPTIONS", tuple((options | short_timeouts).items()))
    async with frozen_server() as port, AsyncClient(f"127.0.0.1:{port}", resume_timeout=0) as client:
        with pytest.raises(Unavailable):
            await asyncio.wait_for(client.generate("p"), 50)
