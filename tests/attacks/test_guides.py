"""Hostile guides: a tenant whose grammars take long to compile or to follow does not delay another one."""

import asyncio
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
KINDS = {"plain": PLAIN, "guided": GUIDED}
KV_TOKENS = 4096
numbers = itertools.count()


def ambiguous() -> sampling_pb2.GuidedDecoding:
    """Slow for each token, and slower with each one; every guide is new."""
    return sampling_pb2.GuidedDecoding(ebnf=f'root ::= root root | "a" | "" | root root root | "{next(numbers)}"')


PROPERTIES = json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(2000)}, "title": "NUMBER"})
RULES = "\n".join(['root ::= r0 | "NUMBER"', *(f'r{i} ::= "x{i}" r{i * 7 % 2000} | "y"' for i in range(2000))])


def many_properties() -> sampling_pb2.GuidedDecoding:
    """Takes long to compile; every guide is new."""
    return sampling_pb2.GuidedDecoding(json_schema=PROPERTIES.replace("NUMBER", str(next(numbers))))


def many_rules() -> sampling_pb2.GuidedDecoding:
    """Takes long to compile, and is valid; every guide is new."""
    return sampling_pb2.GuidedDecoding(ebnf=RULES.replace("NUMBER", str(next(numbers))))


ATTACKS = {"ambiguous": ambiguous, "many properties": many_properties, "many rules": many_rules}


def honest(guided: sampling_pb2.GuidedDecoding) -> pb.GenerationSpec:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Tell me about the sea. " * 30)])
    stopping = sampling_pb2.StoppingCriteria(max_tokens=2)
    return pb.GenerationSpec(chat=chat, stopping=stopping, guided=guided)


def request(guided: sampling_pb2.GuidedDecoding) -> pb.GenerateRequest:
    """A hostile tenant's request."""
    stopping = sampling_pb2.StoppingCriteria(max_tokens=300, ignore_eos=True)
    return pb.GenerateRequest(spec=pb.GenerationSpec(text="x", stopping=stopping, guided=guided))


@pytest.fixture(scope="module")
async def warm_ring(real_model):
    """A ring whose KV cache has been used up, so that its memory grows no more by use."""
    with Ring(str(real_model), engine_args={"kv_cache_tokens": KV_TOKENS}) as ring:
        async with grpc.aio.insecure_channel(ring.address) as channel:
            stub = GenerationServiceStub(channel)
            await asyncio.gather(*(stub.Generate(request(PLAIN), metadata=HOSTILE) for _ in range(KV_TOKENS // 300)))
        await median_first_token(ring.address, honest(GUIDED), 1, Memory(ring.pids))
        yield ring


@pytest.mark.parametrize("attack", ATTACKS)
async def test_hostile_guides_do_not_delay_another_tenant(warm_ring, attack):
    memory = Memory(warm_ring.pids)
    quiet, attacked = {}, {}
    for name, guided in KINDS.items():
        quiet[name] = await median_first_token(warm_ring.address, honest(guided), 6, memory)
    async with grpc.aio.insecure_channel(warm_ring.address) as channel:
        stub = GenerationServiceStub(channel)

        async def send() -> None:
            await stub.Generate(request(ATTACKS[attack]()), metadata=HOSTILE, timeout=100.0)

        async with under([send] * SENDERS, memory, 5.0):
            for name, guided in KINDS.items():
                attacked[name] = await median_first_token(warm_ring.address, honest(guided), 6, memory)
    for name in KINDS:
        check(f"{attack}, {name}", quiet[name], attacked[name], memory)
