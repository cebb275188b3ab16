"""A flood of large images from one tenant does not delay the requests of another one."""

import io
import itertools
import os

import grpc
import PIL.Image
import pytest

from bench.deaths.images import write_model
from sluice.launch import Ring
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from tests.attacks.damage import HOSTILE, Memory, check, median_first_token, under

pytestmark = [pytest.mark.long, pytest.mark.process]

SENDERS = 64
PIXELS = 3000
STOPPING = sampling_pb2.StoppingCriteria(max_tokens=2)
CHAT = pb.GenerationSpec(
    chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Tell me about the sea. " * 30)]),
    stopping=STOPPING,
)


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    with Ring(str(write_model(tmp_path_factory.mktemp("llava")))) as ring:
        yield ring


def picture() -> bytes:
    """9 million pixels to decode, and noise in one corner, so that no two pictures are alike."""
    image, file = PIL.Image.new("RGB", (PIXELS, PIXELS)), io.BytesIO()
    image.paste(PIL.Image.frombytes("RGB", (8, 8), os.urandom(192)))
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def flood(data: bytes) -> pb.GenerateRequest:
    message = pb.ChatMessage(role="user", parts=[pb.ContentPart(image=pb.Image(data=data))])
    return pb.GenerateRequest(spec=pb.GenerationSpec(chat=pb.ChatPrompt(messages=[message]), stopping=STOPPING))


async def test_a_flood_of_images_does_not_delay_another_tenant(ring):
    floods = itertools.cycle([flood(picture()) for _ in range(SENDERS)])
    memory = Memory(ring.pids)
    await median_first_token(ring.address, CHAT, 2, memory)
    quiet = await median_first_token(ring.address, CHAT, 8, memory)
    async with grpc.aio.insecure_channel(ring.address) as channel:
        stub = GenerationServiceStub(channel)
        async with under([lambda: stub.Generate(next(floods), metadata=HOSTILE, timeout=60.0)] * SENDERS, memory):
            attacked = await median_first_token(ring.address, CHAT, 8, memory)
    check("images", quiet, attacked, memory)
