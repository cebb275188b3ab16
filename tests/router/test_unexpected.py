"""Unexpected exceptions: the client gets INTERNAL and an error id, the log the details."""

import grpc
import pytest
from google.protobuf.message import Message
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from router.api.rpc import guarded
from sluice.v1 import admin_pb2
from tests.router.conftest import Details, refused, text_spec

SECRET = "/srv/secret"


def fail(*_, **__):
    raise OSError(28, "No space left on device", SECRET)


class Unsendable:
    """A response that cannot be encoded."""

    SerializeToString = fail


async def answer_unsendable(*_):
    return Unsendable()


def generate(client):
    return client.generate(text_spec())


def stream(client):
    return client.events(text_spec())


def stats(client):
    return client.admin.GetStats(admin_pb2.GetStatsRequest())


def stream_stats(client):
    return client.admin.StreamStats(admin_pb2.StreamStatsRequest()).read()


def models(client):
    return client.models.ListModels(admin_pb2.ListModelsRequest())


def check_health(client):
    return HealthStub(client.channel).Check(health_pb2.HealthCheckRequest())


def watch_health(client):
    return HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest()).read()


def reflect(client):
    return ServerReflectionStub(client.channel).ServerReflectionInfo(iter([question()])).read()


def question() -> Message:
    return reflection_pb2.ServerReflectionRequest(list_services="")


def check(client, details: Details) -> None:
    """Check everything that the client sees, and the one log line with the details."""
    error = details.error
    assert (details.code, details.info.reason) == (StatusCode.INTERNAL, "INTERNAL")
    assert "OSError" not in repr(error)
    assert SECRET not in repr(error)
    assert SECRET not in repr(error.trailing_metadata())
    (line,) = client.lines("call_failed")
    assert line["error_id"] == details.info.metadata["error_id"]
    assert line["error_id"] in error.details()
    assert SECRET in line["exception"]


@pytest.mark.parametrize(
    ("broken", "call"),
    [
        ("router.text.tokenizer_pool.TokenizerPool.tokens", generate),
        ("router.text.tokenizer_pool.TokenizerPool.tokens", stream),
        ("router.parse.parse.parse_prompt", generate),
        ("router.api.responses.ResponseBuilder.response", generate),
        ("router.api.responses.ResponseBuilder.started", stream),
        ("router.api.responses.ResponseBuilder.update", stream),
        ("router.api.responses.ResponseBuilder.done", stream),
        ("router.requests.registry.RequestCounters.on_ended", generate),
        ("router.api.admin_service.AdminService._stats", stats),
        ("router.api.admin_service.AdminService._stats", stream_stats),
        ("router.api.health.HealthService._answer", check_health),
        ("router.api.health.HealthService._answer", watch_health),
        ("router.api.reflection.ReflectionServicer._list_services", reflect),
        ("router.access.access.Authenticator._tenant", generate),
        ("router.access.access.Authenticator._tenant", reflect),
    ],
)
async def test_the_text_of_an_exception_stays_in_the_log(client, monkeypatch, broken, call):
    monkeypatch.setattr(broken, fail)
    check(client, await refused(call(client)))


@pytest.mark.parametrize(
    ("broken", "call"),
    [
        ("router.api.model_service.ModelService.list_models", models),
        ("router.api.admin_service.AdminService.get_stats", stats),
    ],
)
async def test_a_response_that_cannot_be_encoded(ring, start, monkeypatch, broken, call):
    monkeypatch.setattr(broken, answer_unsendable)
    ring.add_engine()
    ring.add_detokenizer()
    client = await start()
    check(client, await refused(call(client)))


class FailingLogger:
    """A logger whose stream is on a full disk."""

    def bind(self, **_):
        return self

    def __getattr__(self, _):
        return fail


async def test_a_log_that_cannot_be_written():
    """Not even the log line about the failure can be written."""

    async def answer(*_):
        fail()

    server = grpc.aio.server()
    method = grpc.stream_unary_rpc_method_handler(guarded(answer, FailingLogger()))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Call": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            details = await refused(channel.unary_unary("/test.Service/Call")(b""))
    finally:
        await server.stop(None)
    assert (details.code, details.info.reason) == (StatusCode.INTERNAL, "INTERNAL")
    assert SECRET not in repr(details.error)


async def test_the_router_keeps_serving_after_an_exception(client, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("router.text.tokenizer_pool.TokenizerPool.tokens", fail)
        await refused(generate(client))
    assert (await generate(client)).usage.completion_tokens == 24
    assert not client.router.ring.requests.open
