"""A peer with the key of a detokenizer or an engine sends garbage, replays, gaps, floods and absurd heartbeats.

The streams of others keep their exact text and about their time to first token, no process grows, and a log line names
the problem.
"""

import asyncio
import time
from collections import Counter

import pytest

from sluice.client import AsyncClient
from sluice.ring.keys import ROLES, generate
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from tests.attacks import liar
from tests.attacks.damage import Memory, check, median_first_token, under
from tests.attacks.liar import BIG, Liar, LoggedRing

pytestmark = [pytest.mark.long, pytest.mark.process]

CHAT = pb.GenerationSpec(
    chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Tell me about the sea. " * 30)]),
    stopping=sampling_pb2.StoppingCriteria(max_tokens=2),
)
CULPRIT = {"frames_rejected", "heartbeat_rejected", "frames_lost", "bad_address", "streams_refused"}

MAX_LINES = 60
"""Log lines that an attack of a few seconds may cause."""

TO_ROUTER = {
    "garbage": lambda address: liar.garbage(100),
    "large garbage": lambda address: liar.garbage(BIG),
    "large batches": lambda address: liar.in_order([liar.text("liar", 1 << 20)] * 10_000),
    "replays": lambda address: liar.replays(liar.text("detok-0")),
    "gaps": lambda address: liar.gaps(liar.text("detok-0")),
    "gaps of heartbeats": lambda address: liar.gaps(liar.detokenizer_heartbeat("detok-0", address, 1)),
    "flood": lambda address: liar.in_order([liar.text("liar")] * 10_000_000),
    "heartbeats of unknown peers": lambda address: liar.changing(
        lambda i: liar.detokenizer_heartbeat(f"liar-{i}", f"ipc:///liar-{i}", i)
    ),
    "heartbeats of another peer": lambda address: liar.changing(
        lambda i: liar.detokenizer_heartbeat("detok-0", address, i)
    ),
    "one heartbeat of another peer": lambda address: liar.in_order([liar.detokenizer_heartbeat("detok-0", address, 1)]),
    "heartbeats with many losses": lambda address: liar.changing(
        lambda i: liar.detokenizer_heartbeat("detok-0", address, 1, missed=100_000)
    ),
}
AS_ENGINE = {
    "heartbeats of another engine": lambda address: liar.changing(
        lambda i: liar.engine_heartbeat("engine-0", address, i)
    ),
}
TO_DETOKENIZER = {
    "garbage": lambda router: liar.garbage(100),
    "large garbage": lambda router: liar.garbage(BIG),
    "gaps": lambda router: liar.gaps(liar.keep_alive("engine-0", 1)),
    "restarts": lambda router: liar.changing(lambda i: liar.keep_alive("engine-0", i)),
    "engines": lambda router: liar.changing(lambda i: liar.keep_alive(f"liar-{i}", i)),
    "streams": lambda router: liar.changing(lambda i: liar.opening(router, i)),
    "bad routers": lambda router: liar.changing(lambda i: liar.opening(f"nonsense-{i}", i)),
    "routers": lambda router: liar.changing(lambda i: liar.opening(f"ipc:///tmp/liar-{i}", i)),
    "unknown rows": lambda router: liar.changing(lambda i: liar.unknown_rows(i * 1000, 1000)),
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for role in ROLES:
        generate(folder, role)
    return folder


@pytest.fixture(scope="module")
def ring(keys, real_model):
    with LoggedRing(keys, model=str(real_model), detokenizers=1, engine_args={"threads": 1}) as ring:
        yield ring


@pytest.mark.parametrize("attack", TO_ROUTER)
async def test_lies_of_a_detokenizer_to_a_router(ring, keys, attack):
    frames = TO_ROUTER[attack](ring.inbox("detok-0"))
    await measure(ring, attack, Liar(keys, "detok", ring.inbox("router"), "router", frames))


@pytest.mark.parametrize("attack", AS_ENGINE)
async def test_lies_of_an_engine_to_a_router(ring, keys, attack):
    frames = AS_ENGINE[attack](ring.inbox("engine-0"))
    await measure(ring, attack, Liar(keys, "engine", ring.inbox("router"), "router", frames))


@pytest.mark.parametrize("attack", TO_DETOKENIZER)
async def test_lies_of_an_engine_to_a_detokenizer(ring, keys, attack):
    frames = TO_DETOKENIZER[attack](ring.inbox("router"))
    await measure(ring, attack, Liar(keys, "engine", ring.inbox("detok-0"), "detok", frames))


async def measure(ring, name, attacker):
    memory = Memory(ring.pids)
    options = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    async with AsyncClient(ring.address) as client:
        text = (await client.generate("The sea", **options)).text
        quiet = await median_first_token(ring.address, CHAT, 5, memory)
        before = Counter(line["event"] for line in ring.log)
        began = time.monotonic()
        stream = asyncio.ensure_future(client.generate("The sea", **options))
        async with under([], memory, warm_up=0.0):
            with attacker:
                await asyncio.sleep(1.0)
                attacked = await median_first_token(ring.address, CHAT, 5, memory)
                texts = (await stream).text, (await client.generate("The sea", **options)).text
    lines = Counter(line["event"] for line in ring.log) - before
    print(f"{attacker.sent} frames in {time.monotonic() - began:.1f} s, log: {dict(lines)}")
    check(name, quiet, attacked, memory)
    assert texts == (text, text)
    del lines["request_ended"]
    assert lines.total() <= MAX_LINES
    assert lines.keys() & CULPRIT
