"""Authentication by tokens: tenants, reloads; what needs no token and what needs an admin's."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from router.access.access import AccessError
from router.access.bearer_tokens import read_tokens
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from tests.fakes.ring_scripts import hang
from tests.router.access.tokens import ALICE, BOB, ROOT, bearer, counts, list_models, sha256
from tests.router.conftest import refused, rest, text_spec


@pytest.fixture
async def guarded(ring, start, tokens, monkeypatch):
    """A router that requires tokens."""
    ring.add_engine()
    ring.add_detokenizer()
    monkeypatch.setattr("router.app.RELOAD_SECONDS", 0.05)
    return await start(tokens_file=str(tokens))


async def test_a_known_token_is_accepted_plain_or_hashed(guarded):
    for token in (ALICE, BOB, ROOT):
        assert (await list_models(guarded, *bearer(token))).models
    assert (await guarded.generate(text_spec(), metadata=(("authorization", f"bearer {ALICE}"),))).outputs
    assert not counts(guarded)
    assert guarded.lines()[0]["tenant"] == "alice"


@pytest.mark.parametrize(
    ("metadata", "cause"),
    [
        ((), "no_token"),
        ((("x-other", "1"),), "no_token"),
        (bearer("mallory-0123456789"), "unknown_token"),
        (bearer(sha256(BOB)), "unknown_token"),
        (bearer(""), "unknown_token"),
        ((("authorization", ALICE),), "unknown_token"),
        ((("authorization", f"Basic {ALICE}"),), "unknown_token"),
        ((*bearer(ALICE), *bearer(BOB)), "unknown_token"),
    ],
)
async def test_a_call_without_a_known_token_is_refused(guarded, metadata, cause):
    for call in (
        guarded.generate(text_spec(), metadata=metadata),
        guarded.events(text_spec(), metadata=metadata),
        list_models(guarded, *metadata),
        guarded.admin.GetStats(admin_pb2.GetStatsRequest(), metadata=metadata),
    ):
        details = await refused(call)
        assert details.code is StatusCode.UNAUTHENTICATED
        assert (details.info.reason, details.info.metadata["cause"]) == ("UNAUTHENTICATED", cause)
        assert ("the call has no token" in details.error.details()) is (cause == "no_token")
    assert counts(guarded) == {cause: 4}
    assert not guarded.lines()


async def test_an_unauthenticated_call_is_refused_before_the_message_is_read(guarded):
    call = guarded.channel.stream_unary("/sluice.v1.GenerationService/Generate")
    silent = call()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await asyncio.wait_for(silent, 60)
    assert error.value.code() is StatusCode.UNAUTHENTICATED


async def test_health_needs_no_token_and_reflection_does(guarded):
    assert (await HealthStub(guarded.channel).Check(health_pb2.HealthCheckRequest())).status == 1
    reflection = ServerReflectionStub(guarded.channel)

    async def reflect(*metadata):
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection.ServerReflectionInfo(iter([question]), metadata=metadata)
        return [answer async for answer in call]

    assert (await refused(reflect())).info.reason == "UNAUTHENTICATED"
    assert (await reflect(*bearer(ALICE)))[0].list_services_response.service


async def test_admin_service_needs_an_admin_token(guarded):
    request = admin_pb2.GetStatsRequest()
    details = await refused(guarded.admin.GetStats(request, metadata=bearer(ALICE)))
    assert (details.code, details.info.metadata["cause"]) == (StatusCode.PERMISSION_DENIED, "not_admin")
    details = await refused(guarded.admin.Drain(admin_pb2.DrainRequest(timeout=Duration()), metadata=bearer(BOB)))
    assert details.info.reason == "FORBIDDEN"
    assert (await guarded.admin.GetStats(request, metadata=bearer(ROOT))).stats.engines
    assert counts(guarded) == {"not_admin": 2}


async def test_the_tenant_is_that_of_the_token(guarded):
    assert await list_models(guarded, *bearer(ALICE, **{"x-sluice-tenant": "alice"}))
    details = await refused(list_models(guarded, *bearer(ALICE, **{"x-sluice-tenant": "bob"})))
    assert (details.code, details.info.metadata["cause"]) == (StatusCode.PERMISSION_DENIED, "other_tenant")
    assert counts(guarded) == {"other_tenant": 1}


async def test_without_tokens_the_metadata_names_the_tenant(client):
    await client.generate(text_spec(), metadata=(("x-sluice-tenant", "alice"),))
    assert client.lines()[0]["tenant"] == "alice"
    for wrong in ("a b", "x" * 65, ""):
        details = await refused(client.generate(text_spec(), metadata=(("x-sluice-tenant", wrong),)))
        assert (details.info.reason, details.fields) == ("INVALID_ARGUMENT", ["x-sluice-tenant"])
    twice = (("x-sluice-tenant", "alice"), ("x-sluice-tenant", "bob"))
    assert (await refused(client.generate(text_spec(), metadata=twice))).info.reason == "INVALID_ARGUMENT"


async def test_the_metadata_key_of_the_tenant_is_a_setting(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(tenant_key="x-team")
    await client.generate(text_spec(), metadata=(("x-team", "alice"), ("x-sluice-tenant", "bob")))
    assert client.lines()[0]["tenant"] == "alice"


async def test_a_caller_cannot_abort_another_tenants_request(guarded, ring):
    ring.script = hang
    call = guarded.stream(text_spec(request_id="r"), metadata=bearer(ALICE))
    await call.read()
    abort = pb.AbortRequest(request_id="r")
    assert not (await guarded.generation.Abort(abort, metadata=bearer(BOB))).aborted
    assert (await guarded.generation.Abort(abort, metadata=bearer(ALICE))).aborted
    await rest(call)
    call = guarded.stream(text_spec(request_id="r"), metadata=bearer(ALICE))
    await call.read()
    assert (await guarded.generation.Abort(abort, metadata=bearer(ROOT))).aborted
    await rest(call)


async def test_request_ids_are_per_tenant(guarded, ring):
    ring.script = hang
    calls = {token: guarded.stream(text_spec(request_id="r"), metadata=bearer(token)) for token in (ALICE, BOB)}
    for call in calls.values():
        await call.read()
    again = await refused(guarded.events(text_spec(request_id="r"), metadata=bearer(BOB)))
    assert again.info.reason == "DUPLICATE_REQUEST"
    abort = pb.AbortRequest(request_id="r")
    assert (await guarded.generation.Abort(abort, metadata=bearer(BOB))).aborted
    await rest(calls[BOB])
    assert not (await guarded.generation.Abort(abort, metadata=bearer(BOB))).aborted
    (alices,) = guarded.router.ring.requests.open
    assert not alices.aborted
    call = guarded.stream(text_spec(request_id="r"), metadata=bearer(BOB))
    await call.read()
    # An admin without a request of this id aborts those of all tenants.
    assert (await guarded.generation.Abort(abort, metadata=bearer(ROOT))).aborted
    await asyncio.gather(rest(call), rest(calls[ALICE]))


async def test_tokens_are_reloaded(guarded, tokens, ring):
    ring.script = hang
    call = guarded.stream(text_spec(request_id="r"), metadata=bearer(ALICE))
    await call.read()
    tokens.write_text(f"{BOB} bob\n{sha256(ROOT)} alice\n")
    loaded = guarded.router._access.reloads.counts
    await guarded.until(lambda: loaded["loaded"] == 1)
    assert (await refused(list_models(guarded, *bearer(ALICE)))).info.reason == "UNAUTHENTICATED"
    assert await list_models(guarded, *bearer(BOB))
    # Running streams continue.
    assert (await guarded.generation.Abort(pb.AbortRequest(request_id="r"), metadata=bearer(ROOT))).aborted
    assert (await rest(call))[-1].HasField("done")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no tokens"),
        ("# no tokens\n\n", "has no tokens"),
        (f"\n{ALICE}\n", "line 2: must be TOKEN TENANT"),
        (f"{ALICE} alice user\n", "line 1: must be TOKEN TENANT"),
        (f"{ALICE} alice admin more\n", "line 1: must be TOKEN TENANT"),
        ("short alice\n", "has 5 characters, must have at least 16"),
        (f"{ALICE} al/ice\n", "line 1: a tenant's name must have"),
        (f"{ALICE} alice\n{sha256(ALICE)} bob\n", "line 2: duplicate token"),
        ("sha256:0123456789abcdef alice\n", "64 lower-case hexadecimal digits"),
        (sha256(ALICE).upper().replace("SHA", "sha") + " alice\n", "64 lower-case hexadecimal digits"),
    ],
)
async def test_an_invalid_token_file_is_reported_by_line_without_its_content(guarded, tokens, text, problem):
    tokens.write_text(text)
    with pytest.raises(ValueError, match="tokens") as error:
        read_tokens(str(tokens))
    assert problem in str(error.value)
    await guarded.until(lambda: guarded.router._access.reloads.counts["failed"] == 1)
    assert await list_models(guarded, *bearer(ALICE))
    (line,) = guarded.lines("file_reload_failed")
    assert problem in line["error"]
    assert ALICE not in str(line)


async def test_a_token_file_that_is_not_text(guarded, tokens):
    tokens.write_bytes(b"\xff\xfe token")
    await guarded.until(lambda: guarded.router._access.reloads.counts["failed"] == 1)
    assert await list_models(guarded, *bearer(ALICE))


@pytest.mark.parametrize(
    "settings", [{"tokens_file": "/no/such/file"}, {"auth": "no_such_module:f"}, {"auth": "f"}, {"auth": "sys:path"}]
)
async def test_unusable_settings_prevent_the_start(start, settings):
    with pytest.raises(AccessError):
        await start(wait=False, **settings)
