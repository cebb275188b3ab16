"""A process that dies or freezes under live streams: each stream ends within the heartbeat bound, the others go on."""

import asyncio
import os
import signal
import time

import pytest

from sluice import AsyncClient
from sluice.client import Unavailable
from sluice.launch import Ring

PEER_TIMEOUT = 5.0
"""Seconds: those that live must not be taken for dead on a machine that has much else to do."""
STREAMS = 12


@pytest.fixture
def doomed_ring():
    with Ring(engines=2, detokenizers=2, router_args={"peer_timeout": PEER_TIMEOUT}) as ring:
        yield ring


async def outcome(client: AsyncClient, i: int, started: asyncio.Semaphore) -> str:
    try:
        async for _ in client.stream(f"# {i}\n", max_tokens=600, ignore_eos=True, seed=i):
            started.release()
    except Unavailable as error:
        return error.reason if error.retry_after else "no retry_after"
    return "whole"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("victim", "reason"), [("engine-0", "ENGINE_LOST"), ("detok-1", "DETOKENIZER_LOST")])
async def test_streams_of_the_dead_end_and_the_others_go_on(doomed_ring, victim, reason, death):
    async with AsyncClient(doomed_ring.address, timeout=200) as client:
        started = asyncio.Semaphore(0)
        streams = [asyncio.ensure_future(outcome(client, i, started)) for i in range(STREAMS)]
        for _ in range(2 * STREAMS):
            await started.acquire()
        os.kill(doomed_ring.pids[victim], death)
        outcomes = await asyncio.gather(*streams)
        assert set(outcomes) == {reason, "whole"}
        assert (await client.generate("def f(", max_tokens=3)).usage.completion_tokens >= 1
        end = time.monotonic() + 60
        while any(
            e.active_requests or e.used_kv_blocks for e in (await client.stats()).engines if e.engine_id != victim
        ):
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        if death is signal.SIGSTOP:
            os.kill(doomed_ring.pids[victim], signal.SIGCONT)
