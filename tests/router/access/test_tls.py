"""TLS and mutual TLS with real handshakes, and certificates that change while streams run."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from pydantic import ValidationError

import router.access.tls as tls_of_router
from router.access.access import AccessError
from router.access.tls import Certificates
from sluice.settings.services import RouterSettings
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import generation_pb2_grpc
from tests.fakes.certificates import Authority, Pair
from tests.fakes.ring_scripts import hang
from tests.router.conftest import rest, text_spec

INTERVAL = 0.05


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "ca")


@pytest.fixture
def other(tmp_path):
    return Authority(tmp_path, "other")


@pytest.fixture
def served(authority, tmp_path) -> Pair:
    """The certificate files that the router reads."""
    pair = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    authority.issue("server").copy_to(pair)
    return pair


@pytest.fixture
async def tls(ring, start, served, monkeypatch):
    """Starts a router with TLS."""
    monkeypatch.setattr("router.app.RELOAD_SECONDS", INTERVAL)
    ring.add_engine()
    ring.add_detokenizer()

    async def begin(**settings):
        return await start(tls_certificate=str(served.certificate), tls_key=str(served.key), **settings)

    return begin


async def outcome(channel: grpc.aio.Channel) -> str:
    """The outcome of a call on a new connection."""
    async with channel:
        try:
            await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def test_clients_that_trust_the_ca_are_served_and_others_are_not(tls, authority, other):
    port = (await tls()).router.port
    assert await outcome(authority.channel(port)) == "OK"
    assert await outcome(other.channel(port)) == "UNAVAILABLE"
    assert await outcome(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) == "UNAVAILABLE"


async def test_with_a_client_ca_only_its_clients_can_connect(tls, authority, other):
    port = (await tls(tls_client_ca=str(authority.certificate))).router.port
    assert await outcome(authority.channel(port, authority.issue("client"))) == "OK"
    assert await outcome(authority.channel(port, other.issue("stranger"))) == "UNAVAILABLE"
    assert await outcome(authority.channel(port)) == "UNAVAILABLE"


async def test_the_counters_show_handshakes_without_a_call(tls, authority, other):
    router = (await tls(tls_client_ca=str(authority.certificate))).router
    handshakes, client = router._access.handshakes, authority.issue("client")
    async with authority.channel(router.port, client) as channel:
        for _ in range(3):
            await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert await outcome(authority.channel(router.port, client)) == "OK"
    assert (handshakes.begun, handshakes.used) == (2, 2)
    assert await outcome(authority.channel(router.port, other.issue("stranger"))) == "UNAVAILABLE"
    assert handshakes.begun > 2, "gRPC may have tried more than once"
    assert handshakes.used == 2


def test_addresses_are_counted_once_while_they_are_remembered(monkeypatch):
    monkeypatch.setattr(tls_of_router, "MAX_PEERS", 2)
    handshakes = tls_of_router.Handshakes()
    for peer in ("a", "b", "a", "c", "a", "b"):
        handshakes.use(peer)
    assert handshakes.used == 4


async def test_reloaded_files_apply_to_new_handshakes_and_do_not_affect_streams(tls, ring, authority, other, served):
    ring.script = hang
    client = await tls()
    router = client.router
    async with authority.channel(router.port) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.GenerateStream(pb.GenerateStreamRequest(spec=text_spec(request_id="r")))
        await call.read()
        other.issue("renewed").copy_to(served)
        await client.until(lambda: router._access.reloads.counts["loaded"] == 1)
        assert await outcome(other.channel(router.port)) == "OK"
        assert await outcome(authority.channel(router.port)) == "UNAVAILABLE"
        assert (await stub.Abort(pb.AbortRequest(request_id="r"))).aborted
        assert (await rest(call))[-1].HasField("done")
    assert client.lines("files_reloaded")


@pytest.mark.parametrize("broken", ["garbage", "other key", "missing"])
async def test_invalid_files_are_logged_and_the_old_ones_stay_in_use(tls, authority, served, broken):
    client = await tls()
    counts = client.router._access.reloads.counts
    if broken == "garbage":
        served.certificate.write_text("no certificate")
    elif broken == "other key":
        served.key.write_bytes(authority.issue("other").key.read_bytes())
    else:
        served.key.unlink()
    await client.until(lambda: counts["failed"] == 1)
    assert await outcome(authority.channel(client.router.port)) == "OK"
    await asyncio.sleep(4 * INTERVAL)
    assert counts == {"failed": 1, "loaded": 0}, "the failure is counted once"
    (line,) = client.lines("file_reload_failed")
    assert str(served.key) in line["files"]
    authority.issue("good").copy_to(served)
    await client.until(lambda: counts["loaded"] == 1)


async def test_a_client_ca_is_reloaded_too(tls, authority, other, tmp_path):
    trusted = tmp_path / "clients.pem"
    trusted.write_bytes(authority.certificate.read_bytes())
    client = await tls(tls_client_ca=str(trusted))
    port, former_client, new_client = client.router.port, authority.issue("before"), other.issue("after")
    assert await outcome(authority.channel(port, new_client)) == "UNAVAILABLE"
    trusted.write_bytes(other.certificate.read_bytes())
    await client.until(lambda: client.router._access.reloads.counts["loaded"] == 1)
    assert await outcome(authority.channel(port, new_client)) == "OK"
    assert await outcome(authority.channel(port, former_client)) == "UNAVAILABLE"


async def test_a_key_that_does_not_match_prevents_the_start(start, authority, served):
    stranger = authority.issue("stranger")
    with pytest.raises(AccessError, match=r"tls\.crt") as error:
        await start(wait=False, tls_certificate=str(served.certificate), tls_key=str(stranger.key))
    assert "KEY_VALUES_MISMATCH" in str(error.value)


def test_an_encrypted_key_is_refused_without_a_prompt(authority, served, tmp_path):
    locked = tmp_path / "locked.key"
    authority._openssl("ec", "-in", served.key, "-aes256", "-passout", "pass:secret", "-out", locked)
    with pytest.raises(ValueError, match=r"locked\.key"):
        Certificates(str(served.certificate), str(locked), None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "router.example"])
def test_public_listeners_need_tls(host):
    with pytest.raises(ValidationError, match="can be reached from other machines"):
        RouterSettings(model="m", host=host)
    assert RouterSettings(model="m", host=host, insecure=True).host == host
    assert RouterSettings(model="m", host=host, tls_certificate="c", tls_key="k").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.7", "::1", "localhost"])
def test_loopback_needs_no_tls(host):
    assert RouterSettings(model="m", host=host).admin_on_main


@pytest.mark.parametrize(
    "settings",
    [
        {"tls_certificate": "c"},
        {"tls_key": "k"},
        {"tls_client_ca": "a"},
        {"admin_tokens_file": "t"},
        {"admin_port": 1, "admin_host": "0.0.0.0"},
        {"admin_port": 1, "admin_host": "0.0.0.0", "insecure": True},
    ],
)
def test_conflicting_settings(settings):
    with pytest.raises(ValidationError):
        RouterSettings(model="m", **settings)
