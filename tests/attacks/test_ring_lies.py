"""A peer with the key of a detokenizer or an engine sends garbage, replays, gaps, floods and absurd heartbeats.

The streams of others keep their exact text and about their time to first token, no process grows, and a log line names
the problem.
"""

import itertools
import time

import pytest

from sluice.client import AsyncClient
from sluice.host.limited_log import INTERVAL_SECONDS
from sluice.lanes.keys import ROLES, generate
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from sluice.wire.rows import MAX_TEXT_ROWS
from tests.attacks import liar
from tests.attacks.damage import Memory, check, median_first_token, under
from tests.attacks.liar import BIG, Liar, LoggedRing

pytestmark = [pytest.mark.long, pytest.mark.process]

PROMPT = pb.GenerationSpec(text="def area(x, y): " * 20, stopping=sampling_pb2.StoppingCriteria(max_tokens=2))
SECONDS = 2.0
"""Duration of an attack."""
CULPRIT = {"frame_rejected", "heartbeat_rejected", "frames_lost", "bad_address", "engine_restarted"}
"""Log lines that name the problem. Floods of valid frames that concern no stream are only counted."""
MAX_LINES = 25
"""Log lines that an attack of a few seconds may cause."""
FAST, SLOW = 0.0002, 0.05
"""Pauses between frames. Without any, the attacker, which is on another machine in reality, takes the cores itself."""
STREAM = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}

TO_ROUTER = {
    "garbage": lambda address: (liar.garbage(100), FAST),
    "large garbage": lambda address: (liar.garbage(BIG), SLOW),
    "large batches": lambda address: (liar.repeated(liar.text("liar", MAX_TEXT_ROWS)), SLOW),
    "too large batches": lambda address: (liar.repeated(liar.text("liar", 1 << 20)), SLOW),
    "frames that decode to much more": lambda _: (itertools.repeat(liar.empty_statistics(BIG // 8)), SLOW),
    "replays": lambda address: (liar.replays(liar.text("detok-0")), FAST),
    "gaps": lambda address: (liar.gaps(liar.text("detok-0")), FAST),
    "flood": lambda address: (liar.repeated(liar.text("liar")), FAST),
    "heartbeats of unknown peers": lambda address: (
        liar.changing(lambda i: liar.detokenizer_heartbeat(f"liar-{i}", f"ipc:///liar-{i}", i)),
        FAST,
    ),
    "heartbeats of another peer": lambda address: (
        liar.changing(lambda i: liar.detokenizer_heartbeat("detok-0", address, i)),
        FAST,
    ),
    "heartbeats with many losses": lambda address: (
        liar.repeated(liar.detokenizer_heartbeat("detok-0", address, 1, missed=100_000)),
        SLOW,
    ),
}
AS_ENGINE = {
    "heartbeats of another engine": lambda address: (
        liar.changing(lambda i: liar.engine_heartbeat("engine-0", address, i)),
        FAST,
    ),
}
TO_DETOKENIZER = {
    "garbage": lambda router: (liar.garbage(100), FAST),
    "large garbage": lambda router: (liar.garbage(BIG), SLOW),
    "gaps": lambda router: (liar.gaps(liar.keep_alive("engine-0", 1)), FAST),
    "restarts": lambda router: (liar.changing(lambda i: liar.keep_alive("engine-0", i)), FAST),
    "engines": lambda router: (liar.changing(lambda i: liar.keep_alive(f"liar-{i}", i)), FAST),
    "streams": lambda router: (liar.changing(lambda _: liar.opening(router)), FAST),
    "bad routers": lambda router: (liar.changing(lambda i: liar.opening(f"nonsense-{i}")), FAST),
    "routers": lambda router: (liar.changing(lambda i: liar.opening(f"ipc:///tmp/liar-{i}")), FAST),
    "unknown rows": lambda router: (liar.changing(lambda i: liar.unknown_rows(i * 1000, 1000)), SLOW),
}
SILENT = {"large batches", "flood", "engines", "streams", "unknown rows"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for role in ROLES:
        generate(folder, role)
    return folder


@pytest.fixture(scope="module")
def ring(keys):
    with LoggedRing(keys, detokenizers=1, engine_args={"threads": 1}) as ring:
        yield ring


@pytest.mark.parametrize("attack", TO_ROUTER)
async def test_lies_of_a_detokenizer_to_a_router(ring, keys, attack):
    frames, pause = TO_ROUTER[attack](ring.inbox("detok-0"))
    await measure(ring, attack, Liar(keys, "detok", ring.inbox("router"), "router", frames, pause))


@pytest.mark.parametrize("attack", AS_ENGINE)
async def test_lies_of_an_engine_to_a_router(ring, keys, attack):
    frames, pause = AS_ENGINE[attack](ring.inbox("engine-0"))
    await measure(ring, attack, Liar(keys, "engine", ring.inbox("router"), "router", frames, pause))


@pytest.mark.parametrize("attack", TO_DETOKENIZER)
async def test_lies_of_an_engine_to_a_detokenizer(ring, keys, attack):
    frames, pause = TO_DETOKENIZER[attack](ring.inbox("router"))
    await measure(ring, attack, Liar(keys, "engine", ring.inbox("detok-0"), "detok", frames, pause))


async def measure(ring, name, attacker):
    memory = Memory(ring.pids)
    async with AsyncClient(ring.address, timeout=60.0) as client:
        text = (await client.generate("The sea", **STREAM)).text
        quiet = await median_first_token(ring.address, PROMPT, 5, memory)
        began = time.monotonic()
        async with under([], memory, warm_up=0.0):
            with attacker:
                # Long enough for a peer whose heartbeats are not accepted to count as lost.
                texts = [(await client.generate("The sea", **STREAM)).text]
                attacked = await median_first_token(ring.address, PROMPT, 5, memory)
                while time.monotonic() < began + SECONDS:
                    texts.append((await client.generate("The sea", **STREAM)).text)
    lines = ring.events(began)
    del lines["request_ended"]
    print(f"{name}: {attacker.sent} frames; log: {dict(lines)}")
    check(name, quiet, attacked, memory)
    assert set(texts) == {text}
    assert lines.total() <= MAX_LINES
    # If an earlier attack has used up the lines of the event, the next one comes later.
    assert name in SILENT or ring.events(began - INTERVAL_SECONDS).keys() & CULPRIT
