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
MAX_TOKENS = 40
SCHEMA = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
PLAIN = sampling_pb2.GuidedDecoding()
GUIDED = sampling_pb2.GuidedDecoding(json_schema=SCHEMA)
KINDS = {"plain": PLAIN, "guided": GUIDED}
KV_TOKENS = 12_288
"""Enough for all senders, who could otherwise delay others by occupying the cache, guided or not."""
SOME_RULES = 1500
"""As many as fit in the 64 KiB of a guide."""
numbers = itertools.count()


def ambiguous() -> sampling_pb2.GuidedDecoding:
    """Slow for each token, and slower with each one; every guide is new."""
    return sampling_pb2.GuidedDecoding(ebnf=f'root ::= root root | "a" | "" | root root root | "{next(numbers)}"')


PROPERTIES = json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(SOME_RULES)}, "title": "NUMBER"})
RULES = "\n".join(
    ['root ::= r0 | "NUMBER"', *(f'r{i} ::= "x{i}" r{i * 7 % SOME_RULES} | "y"' for i in range(SOME_RULES))]
)


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
    stopping = sampling_pb2.StoppingCriteria(max_tokens=MAX_TOKENS, ignore_eos=True)
    return pb.GenerateRequest(spec=pb.GenerationSpec(text="x", stopping=stopping, guided=guided))


@pytest.fixture(scope="module")
def real_ring(real_model):
    with Ring(str(real_model), engine_args={"kv_cache_tokens": KV_TOKENS, "threads": 1}) as ring:
        yield ring


async def use_all_memory(ring: Ring) -> None:
    """Use the whole KV cache and start the guide processes, so that memory grows no more by use."""
    stopping = sampling_pb2.StoppingCriteria(max_tokens=1)
    prompts = [pb.TokenIds(ids=[number] * 1024) for number in range(100, 100 + KV_TOKENS // 1024)]
    specs = [pb.GenerationSpec(token_ids=ids, stopping=stopping) for ids in prompts]
    async with grpc.aio.insecure_channel(ring.address) as channel:
        stub = GenerationServiceStub(channel)
        await asyncio.gather(*(stub.Generate(pb.GenerateRequest(spec=spec), metadata=HOSTILE) for spec in specs))
        await stub.Generate(pb.GenerateRequest(spec=honest(GUIDED)))


@pytest.mark.parametrize("attack", ATTACKS)
async def test_hostile_guides_do_not_delay_another_tenant(real_ring, attack):
    await use_all_memory(real_ring)
    memory = Memory(real_ring.pids)
    quiet, attacked = {}, {}
    for name, guided in KINDS.items():
        quiet[name] = await median_first_token(real_ring.address, honest(guided), 6, memory)
    async with grpc.aio.insecure_channel(real_ring.address) as channel:
        stub = GenerationServiceStub(channel)

        async def send() -> None:
            await stub.Generate(request(ATTACKS[attack]()), metadata=HOSTILE, timeout=100.0)

        async with under([send] * SENDERS, memory, 5.0):
            for name, guided in KINDS.items():
                attacked[name] = await median_first_token(real_ring.address, honest(guided), 6, memory)
    for name in KINDS:
        check(f"{attack}, {name}", quiet[name], attacked[name], memory)
