"""Health, reflection, models, statistics."""

import asyncio

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2

from router.peers.kv_groups import KvSite
from router.peers.prefix_index import PrefixIndex
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import SamplingParams
from sluice.wire.stats import StepStats
from tests.fakes.ring_scripts import TIMES, hang
from tests.router.conftest import refused, rest, text_spec

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = {
    "sluice.v1.GenerationService",
    "sluice.v1.ModelService",
    "sluice.v1.AdminService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}


def check_request(name=""):
    return health_pb2.HealthCheckRequest(service=name)


async def test_health_follows_the_ring(ring, start):
    engine = ring.add_engine()
    client = await start(wait=False, detokenizers=(f"ipc://{ring.folder}/detok",), peer_timeout=1.0, ready_grace=0.0)
    health = HealthStub(client.channel)
    watchers = [health.Watch(check_request()), health.Watch(check_request())]
    assert [(await watcher.read()).status for watcher in watchers] == [NOT_SERVING] * 2
    assert (await health.Check(check_request("readiness"))).status == NOT_SERVING
    assert (await health.Check(check_request("liveness"))).status == SERVING
    await client.until(lambda: client.router.ring.membership.engines.usable)
    assert (await health.Check(check_request())).status == NOT_SERVING
    ring.add_detokenizer("detok")
    assert (await watchers[0].read()).status == SERVING
    watchers[0].cancel()
    for name in ("", "sluice.v1.GenerationService", "sluice.v1.ModelService", "sluice.v1.AdminService"):
        assert (await health.Check(check_request(name))).status == SERVING
    assert (await health.Check(check_request("readiness"))).status == SERVING
    # The other watcher still gets updates after the first has disconnected.
    assert (await watchers[1].read()).status == SERVING
    engine.beating = False
    assert (await watchers[1].read()).status == NOT_SERVING
    engine.beating = True
    assert (await watchers[1].read()).status == SERVING
    await client.admin.Drain(admin_pb2.DrainRequest(timeout=Duration()))
    assert (await watchers[1].read()).status == NOT_SERVING


async def test_health_of_an_unknown_service(client):
    health = HealthStub(client.channel)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await health.Check(check_request("unknown.Service"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    watcher = health.Watch(check_request("unknown.Service"))
    assert (await watcher.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_a_client_can_list_and_call_methods_by_reflection_alone(client, version):
    question = client.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    info = question()

    async def reflect(**fields):
        await info.write(reflection_pb2.ServerReflectionRequest(**fields))
        return await info.read()

    listed = await reflect(list_services="")
    assert {service.name for service in listed.list_services_response.service} == SERVICES
    pool, added = DescriptorPool(), set()
    for service in sorted(SERVICES):
        answer = await reflect(file_containing_symbol=service)
        files = map(FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto)
        pending = [file for file in files if file.name not in added]
        assert answer.file_descriptor_response.file_descriptor_proto
        while pending:
            file = next(file for file in pending if added.issuperset(file.dependency))
            pool.Add(file)
            added.add(file.name)
            pending.remove(file)
        assert pool.FindServiceByName(service).methods
    by_name = await reflect(file_by_filename="sluice/v1/generation.proto")
    assert by_name.file_descriptor_response.file_descriptor_proto
    assert (await reflect(file_containing_symbol="sluice.v1.Nothing")).error_response.error_code == 5
    method = pool.FindServiceByName("sluice.v1.GenerationService").methods_by_name["Generate"]
    request = GetMessageClass(method.input_type)()
    request.spec.text = "def f(x):"
    call = client.channel.unary_unary(
        "/sluice.v1.GenerationService/Generate",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    assert (await call(request)).usage.completion_tokens == 24
    await info.done_writing()


async def test_models(client, checkpoint):
    (model,) = (await client.models.ListModels(admin_pb2.ListModelsRequest())).models
    assert model.name == "tiny"
    assert (model.max_context_tokens, model.vocab_size, model.dtype) == (2048, 4096, "bfloat16")
    assert tuple(model.eos_token_ids) == checkpoint.eos_token_ids
    assert model.tokenizer_fingerprint
    assert "chat" in model.capabilities
    for name in ("", "tiny"):
        info = await client.models.GetModelInfo(admin_pb2.GetModelInfoRequest(model=name))
        assert info.model == model


async def test_default_sampling_is_shown_and_applies(ring, start):
    ring.add_engine(), ring.add_detokenizer()
    client = await start(default_sampling={"temperature": 0.25, "top_k": 7})
    (model,) = (await client.models.ListModels(admin_pb2.ListModelsRequest())).models
    assert (model.default_sampling.temperature, model.default_sampling.top_k) == (0.25, 7)
    await client.events(text_spec(sampling=SamplingParams(temperature=0.5)))
    (call,) = ring.calls
    assert (call.submit.sampling.temperature, call.submit.sampling.top_k) == (0.5, 7)


async def test_statistics_equal_the_heartbeats(ring, start):
    names = StepStats.__struct_fields__
    plain = [name for name in names if name not in ("time", "step_seconds")]
    fake = ring.add_engine()
    fake.stats, fake.max_batch_size = StepStats(**{name: i for i, name in enumerate(names, 1)}), 5
    ring.add_detokenizer("detok")
    client = await start()
    stats = (await client.admin.GetStats(admin_pb2.GetStatsRequest())).stats
    (engine,) = stats.engines
    assert (engine.engine_id, engine.max_batch_size) == ("engine", 5)
    assert {name: getattr(engine, name) for name in plain} == {name: names.index(name) + 1 for name in plain}
    assert engine.time.ToNanoseconds() == (names.index("time") + 1) * 10**9
    assert engine.step_time.ToNanoseconds() == (names.index("step_seconds") + 1) * 10**9
    fields = {field.name for field in admin_pb2.EngineStats.DESCRIPTOR.fields}
    of_engine = {"engine_id", "draining", "model_fingerprint", "model_version", "max_batch_size"}
    assert fields == {*plain, *of_engine, "time", "step_time"}
    assert [detokenizer.detokenizer_id for detokenizer in stats.detokenizers] == ["detok"]
    assert stats.time.seconds > 1_700_000_000


async def test_stream_stats(client):
    call = client.admin.StreamStats(admin_pb2.StreamStatsRequest(interval=Duration(nanos=100_000_000)))
    times = [(await call.read()).stats.time.ToMilliseconds() for _ in range(3)]
    assert times == sorted(set(times))
    call.cancel()


async def test_server_info(client):
    info = await client.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
    assert info.version
    assert not info.draining
    assert info.start_time.seconds > 1_700_000_000
    assert info.router_id == client.router.settings.id
    assert [(each.engine_id, each.state) for each in info.engines] == [("engine", admin_pb2.PEER_STATE_SERVING)]
    assert [(each.detokenizer_id, each.state) for each in info.detokenizers] == [
        ("detok", admin_pb2.PEER_STATE_SERVING)
    ]
    assert info.engines[0].heartbeat_age.ToMilliseconds() < 60_000
    assert [model.name for model in info.models] == ["tiny"]


async def test_engines_have_their_phase(ring, start):
    for name, phase in (("a", "prefill"), ("b", "decode"), ("c", "both")):
        ring.add_engine(name).phase = phase
    ring.add_detokenizer()
    client = await start()
    info = await client.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
    assert {engine.engine_id: engine.phase for engine in info.engines} == {
        "a": admin_pb2.ENGINE_PHASE_PREFILL,
        "b": admin_pb2.ENGINE_PHASE_DECODE,
        "c": admin_pb2.ENGINE_PHASE_BOTH,
    }


async def test_stats_of_requests_and_tenants(client):
    caller = (("x-sluice-tenant", "search"),)
    await client.generate(text_spec(request_id="r"), metadata=caller)
    stats = (await client.admin.GetStats(admin_pb2.GetStatsRequest())).stats
    assert (stats.router.router_id, stats.router.ended_requests) == (client.router.settings.id, 1)
    assert (stats.router.open_requests, stats.router.completion_tokens) == (0, 24)
    (request,) = stats.requests
    assert (request.request_id, request.tenant, request.state, request.open) == ("r", "search", "LENGTH", False)
    assert (request.engine_id, request.detokenizer_id, request.attempts) == ("engine", "detok", 1)
    assert request.completion_tokens == 24
    assert request.time_to_first_token.ToNanoseconds() / 1e9 >= TIMES.queue + TIMES.context
    assert not stats.tenants


async def test_one_log_line_per_request_without_its_text(client):
    await client.events(text_spec("def secret(x):", request_id="r"))
    (line,) = client.lines()
    assert (line["request_id"], line["outcome"], line["completion_tokens"]) == ("r", "LENGTH", 24)
    assert (line["engine"], line["detokenizer"]) == ("engine", "detok")
    assert line["first_token_seconds"] <= line["seconds"]
    assert "secret" not in str(client.logs)


async def test_the_log_line_of_a_unary_request_has_the_first_token_time_of_the_engine(client):
    await client.generate(text_spec())
    assert client.lines()[0]["first_token_seconds"] >= TIMES.queue + TIMES.context


async def test_every_log_line_has_the_unchanged_request_id(client, ring):
    ring.script = hang
    call = client.stream(text_spec(request_id="some:id"))
    await call.read()
    await refused(client.generate(text_spec(request_id="some:id")))
    await refused(client.generate(text_spec(request_id="some:id", n=0)))
    await client.generation.Abort(pb.AbortRequest(request_id="some:id"))
    await rest(call)
    await client.until(lambda: len(client.lines()) == 3)
    assert {line["request_id"] for line in client.lines() + client.lines("abort_called")} == {"some:id"}


async def test_an_invalid_id_is_logged_escaped_and_shortened(client):
    await refused(client.generate(text_spec(request_id="a\n" + "é" * 500)))
    (line,) = client.lines()
    assert line["request_id"].startswith(r"a\n\xe9")
    assert len(line["request_id"]) < 600


async def test_endless_calls_do_not_prevent_the_router_from_stopping(client):
    watcher = HealthStub(client.channel).Watch(check_request())
    stats = client.admin.StreamStats(admin_pb2.StreamStatsRequest())
    await asyncio.gather(watcher.read(), stats.read())
    await asyncio.wait_for(client.router.stop(0.0), 60)


async def test_a_flush_is_acknowledged_by_the_heartbeats_of_all_engines(ring, start, monkeypatch):
    first, second = ring.add_engine("a"), ring.add_engine("b")
    ring.add_detokenizer()
    client = await start()
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 2)
    lost = client.router.ring.placement._lost
    lost.keep(5, KvSite(group="group"), PrefixIndex(10))
    assert lost.all()
    assert (await client.admin.FlushCache(admin_pb2.FlushCacheRequest())).blocks_freed == 14
    assert lost.all() == []
    monkeypatch.setattr("router.api.admin_service.FLUSH_SECONDS", 0.3)
    second.flushing = False
    details = await refused(client.admin.FlushCache(admin_pb2.FlushCacheRequest()))
    assert details.info.reason == "ENGINE_LOST"
    await client.until(lambda: len(first.flushes) == 2)


async def test_a_flush_without_engines(start):
    client = await start(wait=False)
    assert (await refused(client.admin.FlushCache(admin_pb2.FlushCacheRequest()))).info.reason == "NO_ENGINE"
