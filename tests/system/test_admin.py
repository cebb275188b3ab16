"""Operators' calls on a real ring: flushing the prefix cache, and statistics."""

import asyncio
import time

from sluice import AsyncClient
from sluice.v1 import admin_pb2


async def test_a_flush_empties_the_prefix_cache(ring):
    async with AsyncClient(ring.address, timeout=60) as client:
        spec = {"prompt": "# flush me " * 20, "max_tokens": 2, "temperature": 0.0}
        await client.generate(**spec)
        assert (await client.generate(**spec)).usage.cached_tokens > 0
        flushed = await client._routers.current.admin.FlushCache(admin_pb2.FlushCacheRequest())
        assert flushed.blocks_freed > 0
        assert (await client.generate(**spec)).usage.cached_tokens == 0


async def test_statistics_count_the_steps_of_a_request(ring):
    async with AsyncClient(ring.address, timeout=60) as client:
        (before,) = (await client.stats()).engines
        stream = client._routers.current.admin.StreamStats(
            admin_pb2.StreamStatsRequest(interval={"nanos": 200_000_000})
        )
        await client.generate("def f():", max_tokens=300, ignore_eos=True)
        deadline = time.monotonic() + 60
        while (after := (await client.stats()).engines[0]).iteration < before.iteration + 300:
            assert time.monotonic() < deadline, "the engine has not reported its steps"
            await asyncio.sleep(0.1)
        assert after.max_kv_blocks == after.free_kv_blocks + after.used_kv_blocks
        snapshots = [await stream.read() for _ in range(3)]
        assert all(len(snapshot.stats.detokenizers) == 2 for snapshot in snapshots)
        stream.cancel()
