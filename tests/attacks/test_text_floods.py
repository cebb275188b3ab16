"""Floods of texts: a tenant that keeps the tokenizer busy does not delay the requests of another one."""

import json

import grpc
import pytest

from sluice.launch import Ring
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from tests.attacks.damage import HOSTILE, Memory, check, median_first_token, under

pytestmark = [pytest.mark.long, pytest.mark.process]

SENDERS = 64
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
"""A template that writes the tools, which that of the model does not."""
TEXT = "the quick brown fox \N{SNOWMAN} jumps over 日本語 " * 5000
CHAT = pb.GenerationSpec(
    chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Tell me about the sea. " * 30)]),
    stopping=sampling_pb2.StoppingCriteria(max_tokens=2),
)


def floods(stub: GenerationServiceStub):
    text = TEXT.encode()[:250_000].decode(errors="ignore")
    ids = [5] * 65_000
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=text)])
    long_chat = pb.GenerateRequest(spec=pb.GenerationSpec(chat=chat))
    properties = {f"property_{i}": {"type": "string", "enum": ["a", "b"]} for i in range(4000)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    tools = pb.ChatPrompt(
        messages=[pb.ChatMessage(role="user", content="x")],
        tools_json=json.dumps([{"type": "function", "function": function}]),
    )
    long_tools = pb.GenerateRequest(spec=pb.GenerationSpec(chat=tools))
    options = {"metadata": HOSTILE, "timeout": 60.0}
    return {
        "Tokenize": lambda: stub.Tokenize(pb.TokenizeRequest(text=text, offsets=True), **options),
        "Detokenize": lambda: stub.Detokenize(pb.DetokenizeRequest(token_ids=ids), **options),
        "chats that exceed the context": lambda: stub.Generate(long_chat, **options),
        "chats with large tools": lambda: stub.Generate(long_tools, **options),
    }


@pytest.fixture(scope="module")
def real_ring(real_model, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    # With one thread, the engine has a core to itself, as on a host of its own.
    with Ring(str(real_model), engine_args={"threads": 1}, router_args={"chat_template": str(template)}) as ring:
        yield ring


@pytest.mark.parametrize("flood", ["Tokenize", "Detokenize", "chats that exceed the context", "chats with large tools"])
async def test_a_flood_of_texts_does_not_delay_another_tenant(real_ring, flood):
    memory = Memory(real_ring.pids)
    await median_first_token(real_ring.address, CHAT, 2, memory)
    quiet = await median_first_token(real_ring.address, CHAT, 8, memory)
    async with grpc.aio.insecure_channel(real_ring.address) as channel:
        attack = floods(GenerationServiceStub(channel))[flood]
        async with under([attack] * SENDERS, memory):
            attacked = await median_first_token(real_ring.address, CHAT, 8, memory)
    check(flood, quiet, attacked, memory)
