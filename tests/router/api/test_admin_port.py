"""AdminService: on the main port where that is safe, otherwise on a separate port."""

import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from sluice.settings.services import RouterSettings
from sluice.v1 import admin_pb2
from sluice.v1.admin_pb2_grpc import AdminServiceStub, ModelServiceStub
from tests.router.conftest import refused, text_spec

USER, CHIEF, OPERATOR = "user-0123456789ab", "chief-0123456789", "operator-01234567"


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


@contextlib.asynccontextmanager
async def admin_channel(client):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{client.router.admin_port}") as channel:
        yield channel


async def get_stats(channel, token=None):
    return await AdminServiceStub(channel).GetStats(admin_pb2.GetStatsRequest(), metadata=token and bearer(token))


async def unimplemented(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def services(channel):
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in ServerReflectionStub(channel).ServerReflectionInfo(iter([question]))]
    return {service.name.rsplit(".", 1)[1] for service in answers[0].list_services_response.service}


@pytest.fixture
async def begin(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    return start


async def test_a_separate_port_serves_it_and_the_main_port_does_not(begin):
    client = await begin(admin_port=0)
    assert await unimplemented(get_stats(client.channel))
    assert (await client.generate(text_spec())).outputs
    assert "AdminService" not in await services(client.channel)
    async with admin_channel(client) as channel:
        assert (await get_stats(channel)).stats.engines
        assert await unimplemented(ModelServiceStub(channel).ListModels(admin_pb2.ListModelsRequest()))
        assert (await HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status == 1
        assert "GenerationService" not in await services(channel)
    (line,) = client.lines("ready")
    assert line["admin_address"] == f"127.0.0.1:{client.router.admin_port}" != line["address"]


async def test_only_its_own_tokens_are_accepted_on_the_admin_port(begin, tmp_path):
    (tmp_path / "tokens").write_text(f"{USER} user\n{CHIEF} chief admin\n")
    (tmp_path / "admins").write_text(f"{OPERATOR} operators admin\n")
    client = await begin(tokens_file=str(tmp_path / "tokens"), admin_port=0, admin_tokens_file=str(tmp_path / "admins"))
    async with admin_channel(client) as channel:
        assert (await get_stats(channel, OPERATOR)).stats.engines
        for token in (None, USER, CHIEF):
            assert (await refused(get_stats(channel, token))).info.reason == "UNAUTHENTICATED"
        assert (await refused(services(channel))).info.reason == "UNAUTHENTICATED"
    models = admin_pb2.ListModelsRequest()
    assert (await refused(client.models.ListModels(models, metadata=bearer(OPERATOR)))).info.reason == "UNAUTHENTICATED"


async def test_without_separate_tokens_admin_tokens_are_accepted(begin, tmp_path):
    (tmp_path / "tokens").write_text(f"{USER} user\n{CHIEF} chief admin\n")
    client = await begin(tokens_file=str(tmp_path / "tokens"), admin_port=0)
    async with admin_channel(client) as channel:
        assert (await get_stats(channel, CHIEF)).stats.engines
        assert (await refused(get_stats(channel, USER))).info.reason == "FORBIDDEN"
        assert (await refused(get_stats(channel))).info.reason == "UNAUTHENTICATED"


async def test_it_is_not_served_where_anyone_could_call_it(begin):
    client = await begin(host="0.0.0.0", insecure=True)
    assert await unimplemented(get_stats(client.channel))
    (line,) = client.lines("ready")
    assert line["admin_address"] is None


@pytest.mark.parametrize(
    ("settings", "on_main"),
    [
        ({}, True),
        ({"tokens_file": "t"}, True),
        ({"auth": "m:f"}, True),
        ({"admin_port": 0}, False),
        ({"host": "0.0.0.0", "insecure": True}, False),
        ({"host": "0.0.0.0", "insecure": True, "tokens_file": "t"}, True),
        ({"host": "0.0.0.0", "tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"}, False),
    ],
)
def test_whether_it_is_on_the_main_port(settings, on_main):
    assert RouterSettings(model="m", **settings).admin_on_main is on_main
