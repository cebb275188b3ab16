"""Hostile guides: a tenant whose grammars take long to compile or to follow does not delay another one."""

import itertools
import json

import grpc
import pytest

from sluice.launch import Ring
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from tests.attacks.damage import HOSTILE, Memory, check, median_first_token, under

pytestmark = [pytest.mark.long, pytest.mark.process]

SENDERS = 200
SCHEMA = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
PLAIN = sampling_pb2.GuidedDecoding()
GUIDED = sampling_pb2.GuidedDecoding(json_schema=SCHEMA)
numbers = itertools.count()


def ambiguous() -> sampling_pb2.GuidedDecoding:
    """Slow for each token, and slower with each one; every guide is new."""
    return sampling_pb2.GuidedDecoding(ebnf=f'root ::= root root | "a" | "" | root root root | "{next(numbers)}"')


def many_properties() -> sampling_pb2.GuidedDecoding:
    """Seconds to compile; every guide is new."""
    names = {f"p{i}": {"type": "string"} for i in range(8000)}
    return sampling_pb2.GuidedDecoding(json_schema=json.dumps({"properties": names, "title": str(next(numbers))}))


def many_rules() -> sampling_pb2.GuidedDecoding:
    """Seconds to compile, and valid; every guide is new."""
    rules = (f'r{i} ::= "x{i}" r{i * 7 % 20_000} | "y"' for i in range(20_000))
    return sampling_pb2.GuidedDecoding(ebnf="\n".join([f'root ::= r0 | "{next(numbers)}"', *rules]))


ATTACKS = {"ambiguous": ambiguous, "many properties": many_properties, "many rules": many_rules}


def honest(guided: sampling_pb2.GuidedDecoding) -> pb.GenerationSpec:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Tell me about the sea. " * 30)])
    stopping = sampling_pb2.StoppingCriteria(max_tokens=2)
    return pb.GenerationSpec(chat=chat, stopping=stopping, guided=guided)


@pytest.fixture(scope="module")
def real_ring(real_model):
    with Ring(str(real_model)) as ring:
        yield ring


@pytest.mark.parametrize("attack", ATTACKS)
async def test_hostile_guides_do_not_delay_another_tenant(real_ring, attack):
    memory = Memory(real_ring.pids)
    quiet, attacked = {}, {}
    for name, guided in (("plain", PLAIN), ("guided", GUIDED)):
        await median_first_token(real_ring.address, honest(guided), 2, memory)
        quiet[name] = await median_first_token(real_ring.address, honest(guided), 8, memory)
    async with grpc.aio.insecure_channel(real_ring.address) as channel:
        stub = GenerationServiceStub(channel)

        async def send() -> None:
            stopping = sampling_pb2.StoppingCriteria(max_tokens=300, ignore_eos=True)
            spec = pb.GenerationSpec(text="x", stopping=stopping, guided=ATTACKS[attack]())
            await stub.Generate(pb.GenerateRequest(spec=spec), metadata=HOSTILE, timeout=100.0)

        async with under([send] * SENDERS, memory, 5.0):
            for name, guided in (("plain", PLAIN), ("guided", GUIDED)):
                attacked[name] = await median_first_token(real_ring.address, honest(guided), 8, memory)
    print(memory.growth, quiet, attacked)
    for name in quiet:
        check(f"{attack}, {name}", quiet[name], attacked[name], memory)
