"""An engine with two ranks in a real ring: streams survive when one of the ranks dies or hangs."""

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
    """Texts of all prompts, sent together."""
    with Client(ring.address, timeout=200) as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [answer.text for answer in pool.map(lambda prompt: client.generate(prompt, **SPEC), PROMPTS)]


@pytest.fixture(scope="module")
def texts(shared_ring) -> list[str]:
    """The undisturbed texts."""
    return generate(shared_ring)


def second_rank(ring: Ring) -> int:
    """Process id of rank 1, the only child of rank 0."""
    pid = ring.pids["engine-0"]
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_two_ranks_return_the_texts_of_one(ring, texts):
    assert generate(ring) == texts


@pytest.mark.long
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_survive_when_a_rank_dies_or_hangs(shared_ring, texts, death):
    engine, second = shared_ring.pids["engine-0"], second_rank(shared_ring)
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
