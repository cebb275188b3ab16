"""Routers and the HTTP gateway of a real ring are killed while it answers requests."""

import asyncio
import json
import os
import signal
import threading
import time

import httpx
import pytest

from sluice import AsyncClient, Client
from sluice.client import Unavailable
from sluice.launch import Ring
from tests.fakes.processes import wait_until
from tests.system.gateway.conftest import SEEDED, USER

pytestmark = pytest.mark.process


@pytest.mark.long
async def test_streams_survive_the_death_of_their_router(ring, url):
    """Both routers are killed while 8 streams run."""
    body = {"model": "tiny", "messages": USER, "max_tokens": 300, "ignore_eos": True, "stream": True}
    first = threading.Event()

    async def read(http: httpx.AsyncClient, seed: int, wait: float = 0.0) -> tuple[str, bool]:
        text, done = "", False
        async with http.stream("POST", f"{url}/chat/completions", json=body | {"seed": seed}, timeout=90) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += event["choices"][0]["delta"].get("content", "")
                    if len(text) > 40:
                        first.set()
        return text, done

    async with httpx.AsyncClient() as http:
        undisturbed = await asyncio.gather(*(read(http, seed) for seed in range(8)))
        first.clear()
        streams = [asyncio.create_task(read(http, seed)) for seed in range(8)]
        while not first.is_set():
            await asyncio.sleep(0.01)
        pids = ring.pids
        for router in ("router-0", "router-1"):
            os.kill(pids[router], signal.SIGKILL)
        killed = time.monotonic()
        assert await asyncio.gather(*streams) == undisturbed
        print(f"all ended {time.monotonic() - killed:.1f} s after the kill")
    assert all(done for _, done in undisturbed)
    assert await asyncio.to_thread(wait_until, lambda: are_restarted(ring, pids, "router-0", "router-1"))


def are_restarted(ring: Ring, former: dict[str, int], *killed: str) -> bool:
    """Whether the killed routers have successors, and all routers serve."""
    return all(ring.pids[name] != former[name] for name in killed) and all(map(serves, ring.addresses))


def serves(address: str) -> bool:
    with Client(address) as client:
        try:
            return client.health()
        except Unavailable:
            return False


@pytest.mark.long
async def test_unstreamed_answers_survive_the_death_of_their_router(ring, url):
    """The router is killed that has received many tokens of some of 4 answers."""
    body = {"model": "tiny", "prompt": "def f(n):", "max_tokens": 600, "ignore_eos": True}

    async def complete(http: httpx.AsyncClient, seed: int) -> str:
        count = 1 + seed % 2
        answer = await http.post(f"{url}/completions", json=body | {"seed": seed, "best_of": count}, timeout=200)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 600 * count
        return answer.json()["choices"][0]["text"]

    async def busy_router() -> int:
        """The number of a router one of whose open requests has many tokens."""
        while True:
            for number, router in enumerate(routers):
                requests = (await router.stats()).requests
                if any(request.open and request.completion_tokens >= 150 for request in requests):
                    return number
            await asyncio.sleep(0.01)

    routers = [AsyncClient(address) for address in ring.addresses]
    async with httpx.AsyncClient() as http, routers[0], routers[1]:
        undisturbed = await asyncio.gather(*(complete(http, seed) for seed in range(4)))
        answers = [asyncio.create_task(complete(http, seed)) for seed in range(4)]
        pids = ring.pids
        name = f"router-{await busy_router()}"
        assert not any(answer.done() for answer in answers)
        os.kill(pids[name], signal.SIGKILL)
        assert await asyncio.gather(*answers) == undisturbed
    assert await asyncio.to_thread(wait_until, lambda: are_restarted(ring, pids, name))


@pytest.mark.long
def test_a_killed_gateway_is_restarted_at_its_address(ring, client):
    former = ring.pids["gateway"]
    os.kill(former, signal.SIGKILL)

    def is_restarted() -> bool:
        try:
            return ring.pids["gateway"] != former and httpx.get(f"http://{ring.http_address}/health").status_code == 200
        except httpx.TransportError:
            return False

    assert wait_until(is_restarted)
    assert client.chat.completions.create(messages=USER, **SEEDED).choices
