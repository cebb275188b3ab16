"""What ends is started again, what stands still is told: real services."""

import asyncio
import os
import signal
import time
import urllib.error
import urllib.request

import pytest

from sluice import AsyncClient, Client
from sluice.client import Unavailable
from sluice.launch import LogLine, Ring
from tests.fakes.ports import start_with_metrics
from tests.fakes.processes import LIMIT, wait_until

pytestmark = pytest.mark.timeout(300)

PEER_TIMEOUT = 10.0
PROMPT = "def fibonacci(n):\n"
SPEC = {"max_tokens": 24, "temperature": 0.0}
ROUTER, ENGINE = 0, 1
"""Place of their ports for metrics and health."""
EVENTS = ("service_exited", "service_recovered")


class Told(list[LogLine]):
    def __call__(self, line: LogLine) -> None:
        if line.fields.get("service") == "launcher":
            self.append(line)

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(line.child, line.event) for line in self]


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def small_ring(told):
    """One of each."""
    settings = {"router_args": {"peer_timeout": PEER_TIMEOUT, "ready_grace": 0.0}, "observe": told}
    ring = start_with_metrics(1, 1, **settings)
    try:
        yield ring
        ring.stop()
    finally:
        ring.kill()


def ask(ring: Ring, place: int, path: str = "/readyz", timeout: float = LIMIT) -> tuple[int, str]:
    try:
        url = f"http://127.0.0.1:{ring.plan.metrics_port + place}{path}"
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(ring: Ring) -> str:
    """Text of one request; waits for a ring that is about to be whole."""
    end = time.monotonic() + LIMIT
    with Client(ring.address, timeout=LIMIT) as client:
        while True:
            try:
                return client.generate(PROMPT, **SPEC).text
            except Unavailable:
                assert time.monotonic() < end
                time.sleep(0.1)


def test_the_only_engine_is_killed_and_serves_again(small_ring, told):
    text, pid = generate(small_ring), small_ring.pids["engine-0"]
    assert text
    told.clear()
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: len(told) == 2)
    assert told.events == [("engine-0", each) for each in EVENTS]
    assert generate(small_ring) == text
    assert small_ring.pids["engine-0"] != pid
    assert ask(small_ring, ENGINE) == ask(small_ring, ROUTER) == (200, "ok\n")


STREAMS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.9, "seed": 2, "n": 2},
    {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 1.2, "seed": 4, "top_k": 0, "top_p": 1.0, "stream_interval": 5},
    {"temperature": 0.9, "seed": 5, "stop": ["\n\n\n\n"]},
]


async def follow(client: AsyncClient, spec: dict, half_way: asyncio.Semaphore) -> dict[int, tuple[str, list[int]]]:
    """Text and tokens of each output; every offset must come once, in order."""
    found: dict[int, tuple[str, list[int]]] = {i: ("", []) for i in range(spec.get("n", 1))}
    async for chunk in client.stream(PROMPT, max_tokens=200, ignore_eos=True, token_ids=True, **spec):
        text, tokens = found[chunk.index]
        if chunk.token_ids:
            assert chunk.token_offset == len(tokens)
        found[chunk.index] = (text + chunk.text, [*tokens, *chunk.token_ids])
        if len(tokens) > 20:
            half_way.release()
    return found


@pytest.mark.parametrize(
    "victims",
    [
        ["engine-0", "detok-0"],
        pytest.param(["engine-0"], marks=pytest.mark.long),
        pytest.param(["detok-0"], marks=pytest.mark.long),
    ],
)
async def test_streams_go_on_when_the_only_one_is_started_again(small_ring, told, victims):
    generate(small_ring)
    async with AsyncClient(small_ring.address, timeout=200) as client:
        undisturbed = await asyncio.gather(*(follow(client, spec, asyncio.Semaphore(0)) for spec in STREAMS))
        told.clear()
        half_way = asyncio.Semaphore(0)
        streams = [asyncio.ensure_future(follow(client, spec, half_way)) for spec in STREAMS]
        for _ in range(4):
            await half_way.acquire()
        assert not any(stream.done() for stream in streams)
        for name in victims:
            os.kill(small_ring.pids[name], signal.SIGKILL)
        assert await asyncio.gather(*streams) == undisturbed
    assert await asyncio.to_thread(wait_until, lambda: len(told) >= len(victims) * len(EVENTS))
    assert sorted(told.events) == sorted((name, each) for name in victims for each in EVENTS)


def test_the_only_router_is_killed_and_serves_again_at_its_address(small_ring, told):
    text, address = generate(small_ring), small_ring.address
    told.clear()
    os.kill(small_ring.pids["router"], signal.SIGKILL)
    assert wait_until(lambda: len(told) == 2)
    assert small_ring.address == address
    assert generate(small_ring) == text


def test_a_frozen_engine_takes_readiness_away_from_the_router_until_it_goes_on(small_ring, told):
    text = generate(small_ring)
    told.clear()
    assert ask(small_ring, ROUTER) == (200, "ok\n")
    os.kill(small_ring.pids["engine-0"], signal.SIGSTOP)
    try:
        assert wait_until(lambda: ask(small_ring, ROUTER) == (503, "no engine takes work\n"))
        assert ask(small_ring, ROUTER, "/livez") == (200, "ok\n")
        with pytest.raises(TimeoutError):
            ask(small_ring, ENGINE, timeout=1)
        with Client(small_ring.address, timeout=LIMIT) as client:
            assert client.health("liveness")
            assert not client.health("readiness")
    finally:
        os.kill(small_ring.pids["engine-0"], signal.SIGCONT)
    assert wait_until(lambda: ask(small_ring, ROUTER) == (200, "ok\n"))
    assert ask(small_ring, ENGINE) == (200, "ok\n")
    assert generate(small_ring) == text
    assert told == []
