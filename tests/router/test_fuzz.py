"""Random messages to every method of the gRPC port are answered and do not affect other streams."""

import asyncio
import os
import random

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from router.app import ADMIN, GENERATION, HEALTH, MODELS
from sluice.v1 import generation_pb2 as pb
from tests.fakes.mutations import fill, mutate
from tests.router.conftest import text_spec

MESSAGES = int(os.environ.get("SLUICE_FUZZ_MESSAGES", "2000"))
"""Factor for the number of messages in a long run."""
BATCH = 50
SEED = 4
ENDLESS = ("Watch", "StreamStats", "StreamSteps", "StreamCacheEvents")
DRAINS = "Drain"
ENDLESS_SECONDS = 0.05
"""Seconds after which an endless call is cancelled."""
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    # The model with which a resumed stream began no longer exists.
    grpc.StatusCode.FAILED_PRECONDITION,
    # Adapters in requests are not allowed.
    grpc.StatusCode.PERMISSION_DENIED,
}
METHODS = [
    method for service in (GENERATION, MODELS, ADMIN, HEALTH) for method in service.methods if method.name != DRAINS
]
GENERATE = [method for method in METHODS if method.name.startswith("Generate")]


def message(method, chance):
    """A random message, mostly well-formed. Half of the generation requests have a prompt, so other fields matter."""
    request = GetMessageClass(method.input_type)()
    fill(request, chance, likely=chance.choice((0.05, 0.3, 0.8)))
    if method in GENERATE and chance.random() < 0.5:
        request.spec.text = "def f(x):"
        request.spec.ClearField("model")
    data = request.SerializeToString()
    return mutate(data, chance) if chance.random() < 0.6 else data


async def send(channel, method, data):
    path = f"/{method.containing_service.full_name}/{method.name}"
    seconds = ENDLESS_SECONDS if method.name in ENDLESS else 60
    if not method.server_streaming:
        call = channel.unary_unary(path)(data, timeout=seconds)
        await asyncio.wait({asyncio.ensure_future(call.code())})
    else:
        call = channel.unary_stream(path)(data, timeout=seconds)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            pass
    return await call.code()


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_random_messages_do_not_affect_other_streams(client):
    chance = random.Random(SEED)

    async def undisturbed(number):
        spec = text_spec(request_id=f"undisturbed-{number}")
        return "".join(event.delta.text for event in await client.events(spec))

    undisturbed_text = await undisturbed(0)
    sent = 0
    while sent < MESSAGES:
        methods = [chance.choice(GENERATE if chance.random() < 0.5 else METHODS) for _ in range(BATCH)]
        calls = [send(client.channel, method, message(method, chance)) for method in methods]
        undisturbed_texts = asyncio.gather(*(undisturbed(sent + i) for i in range(2)))
        for method, code in zip(methods, await asyncio.gather(*calls), strict=True):
            assert code in ANSWERS, f"{method.full_name} {code}"
        assert await undisturbed_texts == [undisturbed_text, undisturbed_text]
        sent += BATCH
    assert not client.lines("call_failed")
    router = client.router
    await client.until(lambda: not router.ring.requests.open and not router.ring.requests.on_ring)
    assert router.ring.admission.live == router.ring.admission.waiting == 0
    assert (await client.generation.Abort(pb.AbortRequest(request_id="x"))).aborted is False
