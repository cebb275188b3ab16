"""An engine of two ranks in a ring: streams go on when one of them dies or hangs."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sluice import AsyncClient, Client
from sluice.launch import Ring
from tests.fakes.processes import is_alive, wait_until

pytestmark = pytest.mark.timeout(300)

PROMPTS = [f"# {i}\ndef f(x):\n" for i in range(4)]
SPEC = {"max_tokens": 250, "temperature": 0.0, "ignore_eos": True}
ENGINE = {"tensor_parallel": 2, "threads": 1, "kv_cache_tokens": 4096, "rank_timeout": 5.0}


@pytest.fixture(scope="module")
def shared_ring():
    with Ring(engines=1, detokenizers=1, engine_args=ENGINE, router_args={"peer_timeout": 5.0}) as ring:
        yield ring


def generate(ring: Ring) -> list[str]:
    """All prompts at once."""
    with Client(ring.address, timeout=200) as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [answer.text for answer in pool.map(lambda prompt: client.generate(prompt, **SPEC), PROMPTS)]


@pytest.fixture(scope="module")
def texts(shared_ring) -> list[str]:
    """Undisturbed."""
    return generate(shared_ring)


def follower(ring: Ring) -> int:
    pid = ring.pids["engine-0"]
    (found,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found)


def test_the_same_texts_as_of_one_rank(ring, texts):
    assert generate(ring) == texts


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_go_on(shared_ring, texts, death):
    engine, second = shared_ring.pids["engine-0"], follower(shared_ring)
    async with AsyncClient(shared_ring.address, timeout=200) as client:
        begun = asyncio.Semaphore(0)

        async def read(prompt: str) -> str:
            text = ""
            async for chunk in client.stream(prompt, **SPEC):
                text += chunk.text
                begun.release()
            return text

        streams = [asyncio.ensure_future(read(prompt)) for prompt in PROMPTS]
        for _ in range(4 * len(PROMPTS)):
            await begun.acquire()
        assert not any(stream.done() for stream in streams)
        os.kill(second, death)
        assert await asyncio.gather(*streams) == texts
    assert await asyncio.to_thread(wait_until, lambda: shared_ring.pids["engine-0"] != engine)
    assert await asyncio.to_thread(wait_until, lambda: not is_alive(second))
