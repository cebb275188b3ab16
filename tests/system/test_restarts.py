"""Services of a real ring that end are restarted, and those that freeze make the ring unready."""

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
from sluice.launch.logs import LAUNCHER
from tests.fakes.ports import start_with_metrics
from tests.fakes.processes import LIMIT, wait_until
from tests.system.followed_streams import PROMPT, follow

pytestmark = pytest.mark.timeout(300)

PEER_TIMEOUT = 10.0
SPEC = {"max_tokens": 24, "temperature": 0.0}
ROUTER, ENGINE = 0, 1
"""Offsets of their metrics ports."""
EVENTS = ("service_exited", "service_recovered")


class LauncherLog(list[LogLine]):
    """Collects the launcher's log lines about services."""

    def __call__(self, line: LogLine) -> None:
        if line.fields.get("service") == LAUNCHER != line.child:
            self.append(line)

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(line.child, line.event) for line in self]


@pytest.fixture(scope="module")
def launcher_log() -> LauncherLog:
    return LauncherLog()


@pytest.fixture(scope="module")
def small_ring(launcher_log):
    """One service of each kind."""
    settings = {"router_args": {"peer_timeout": PEER_TIMEOUT, "ready_grace": 0.0}, "observe": launcher_log}
    ring = start_with_metrics(1, 1, **settings)
    try:
        yield ring
        ring.stop()
    finally:
        ring.kill()


def get(ring: Ring, service: int, path: str = "/readyz", timeout: float = LIMIT) -> tuple[int, str]:
    try:
        url = f"http://127.0.0.1:{ring.plan.metrics_port + service}{path}"
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(ring: Ring) -> str:
    """The text of one request. Retries while the ring is unavailable."""
    deadline = time.monotonic() + LIMIT
    with Client(ring.address, timeout=LIMIT) as client:
        while True:
            try:
                return client.generate(PROMPT, **SPEC).text
            except Unavailable:
                assert time.monotonic() < deadline
                time.sleep(0.1)


@pytest.mark.long
def test_a_killed_engine_is_restarted(small_ring, launcher_log):
    text, pid = generate(small_ring), small_ring.pids["engine-0"]
    assert text
    launcher_log.clear()
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: len(launcher_log) == 2)
    assert launcher_log.events == [("engine-0", event) for event in EVENTS]
    assert generate(small_ring) == text
    assert small_ring.pids["engine-0"] != pid
    assert get(small_ring, ENGINE) == get(small_ring, ROUTER) == (200, "ok\n")


STREAMS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.9, "seed": 2, "n": 2},
    {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 1.2, "seed": 4, "top_k": 0, "top_p": 1.0, "stream_interval": 5},
    {"temperature": 0.9, "seed": 5, "stop": ["\n\n\n\n"]},
]


@pytest.mark.parametrize(
    "victims",
    [
        ["engine-0", "detok-0"],
        pytest.param(["engine-0"], marks=pytest.mark.long),
        pytest.param(["detok-0"], marks=pytest.mark.long),
    ],
)
async def test_streams_wait_for_the_restart_of_the_only_peer(small_ring, launcher_log, victims):
    generate(small_ring)
    async with AsyncClient(small_ring.address, timeout=200) as client:
        undisturbed = await asyncio.gather(*(follow(client, spec, asyncio.Semaphore(0)) for spec in STREAMS))
        launcher_log.clear()
        half_way = asyncio.Semaphore(0)
        streams = [asyncio.ensure_future(follow(client, spec, half_way)) for spec in STREAMS]
        for _ in range(4):
            await half_way.acquire()
        assert not any(stream.done() for stream in streams)
        for name in victims:
            os.kill(small_ring.pids[name], signal.SIGKILL)
        assert await asyncio.gather(*streams) == undisturbed
    assert await asyncio.to_thread(wait_until, lambda: len(launcher_log) >= len(victims) * len(EVENTS))
    assert sorted(launcher_log.events) == sorted((name, event) for name in victims for event in EVENTS)


def test_a_killed_router_is_restarted_at_its_address(small_ring, launcher_log):
    text, address = generate(small_ring), small_ring.address
    launcher_log.clear()
    os.kill(small_ring.pids["router"], signal.SIGKILL)
    assert wait_until(lambda: len(launcher_log) == 2)
    assert small_ring.address == address
    assert generate(small_ring) == text


@pytest.mark.long
def test_a_router_is_not_ready_while_its_only_engine_is_frozen(small_ring, launcher_log):
    text = generate(small_ring)
    launcher_log.clear()
    assert get(small_ring, ROUTER) == (200, "ok\n")
    os.kill(small_ring.pids["engine-0"], signal.SIGSTOP)
    try:
        assert wait_until(lambda: get(small_ring, ROUTER) == (503, "no engine accepts work\n"))
        assert get(small_ring, ROUTER, "/livez") == (200, "ok\n")
        with pytest.raises(TimeoutError):
            get(small_ring, ENGINE, timeout=1)
        with Client(small_ring.address, timeout=LIMIT) as client:
            assert client.health("liveness")
            assert not client.health("readiness")
    finally:
        os.kill(small_ring.pids["engine-0"], signal.SIGCONT)
    assert wait_until(lambda: get(small_ring, ROUTER) == (200, "ok\n"))
    assert get(small_ring, ENGINE) == (200, "ok\n")
    assert generate(small_ring) == text
    assert launcher_log == []
