"""Every service is restarted, one after the other, under live streams: no error, no repeat, no other text."""

import asyncio

import pytest

from bench.deaths.asked import Asked, mixed
from bench.deaths.played import Played, play
from sluice import AsyncClient
from sluice.launch import Ring

STREAMS = 6
PATIENCE = 120.0
ENGINE = {"threads": 1, "kv_cache_tokens": 32_768}


@pytest.mark.timeout(400)
async def test_nobody_can_tell_a_rolling_restart():
    with Ring(routers=2, engines=2, detokenizers=2, drain_timeout=2, engine_args=ENGINE) as ring:
        before = ring.pids
        asked = mixed(STREAMS, 150)
        async with AsyncClient(ring.addresses, resume_timeout=PATIENCE, retry_timeout=PATIENCE) as client:
            undisturbed = await asyncio.gather(*(play(client, each) for each in asked))
            restart = asyncio.create_task(asyncio.to_thread(ring.restart_all))

            async def again_and_again(each: Asked) -> list[Played]:
                found = []
                while not restart.done():
                    found.append(await play(client, each))
                return found

            disturbed = await asyncio.gather(*map(again_and_again, asked))
            await restart
        assert not set(before.values()) & set(ring.pids.values())
        for truth, played in zip(undisturbed, disturbed, strict=True):
            assert not truth.faults
            assert [found.difference(truth) for found in played] == [""] * len(played)
