"""Many streams over several engines and detokenizers: their texts do not change, all share the load, nothing leaks."""

import asyncio
import time
from collections import Counter, defaultdict

import pytest

from sluice import AsyncClient
from sluice.launch import Ring

STREAMS = 32


@pytest.fixture(scope="module")
def wide_ring():
    with Ring(engines=2, detokenizers=3, engine_args={"kv_cache_tokens": 16384}) as ring:
        yield ring


def request(i: int) -> dict:
    """Greedy, seeded, with stop strings, with penalties, or with two outputs, in turn."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "seed": i},
        {"temperature": 0.0, "stop": [":", "return"]},
        {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "seed": i},
        {"temperature": 1.0, "seed": i, "n": 2},
    ]
    return {
        "prompt": f"class Thing{i}:\n    def method_{i % 7}(self, ",
        "max_tokens": 24 + i % 9,
        **kinds[i % len(kinds)],
    }


async def streamed(client: AsyncClient, spec: dict) -> dict[int, tuple[str, str, int]]:
    """(text, finish reason, completion tokens) of each output. Also checks that offsets are consecutive."""
    texts: defaultdict[int, str] = defaultdict(str)
    offsets: Counter[int] = Counter()
    ends = {}
    async for chunk in client.stream(**spec):
        assert chunk.token_offset == offsets[chunk.index]
        offsets[chunk.index] += chunk.token_count
        texts[chunk.index] += chunk.text
        if chunk.finish_reason is not None:
            ends[chunk.index] = (str(chunk.finish_reason), chunk.completion_tokens)
    return {index: (texts[index], *ends[index]) for index in sorted(ends)}


async def stats_until(client: AsyncClient, condition, seconds: float = 60.0):
    """Poll the statistics until the condition is true, at most `seconds`. Returns the latest statistics."""
    deadline = time.monotonic() + seconds
    while not condition(stats := await client.stats()) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return stats


def nothing_held(stats) -> bool:
    return not any(engine.active_requests or engine.used_kv_blocks for engine in stats.engines) and not any(
        detokenizer.streams for detokenizer in stats.detokenizers
    )


async def test_concurrent_streams_equal_single_runs_and_leave_nothing(wide_ring):
    async with AsyncClient(wide_ring.address, timeout=90) as client:
        alone = [await streamed(client, request(i)) for i in range(STREAMS)]
        together = asyncio.gather(*(streamed(client, request(i)) for i in range(STREAMS)))
        assert await together == alone
        assert nothing_held(await stats_until(client, nothing_held))


async def test_every_engine_and_detokenizer_gets_work(wide_ring):
    peers = {"engine-0", "engine-1", "detok-0", "detok-1", "detok-2"}
    busy: set[str] = set()

    def all_were_busy(stats) -> bool:
        busy.update(engine.engine_id for engine in stats.engines if engine.active_requests)
        busy.update(detok.detokenizer_id for detok in stats.detokenizers if detok.streams)
        return busy == peers

    async def work(client: AsyncClient, i: int) -> None:
        while True:
            await client.generate(f"# file {i}\nimport ", max_tokens=500, ignore_eos=True, seed=i)

    async with AsyncClient(wide_ring.address, timeout=90) as client:
        workers = [asyncio.create_task(work(client, i)) for i in range(16)]
        await stats_until(client, all_were_busy)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        assert busy == peers
        assert nothing_held(await stats_until(client, nothing_held))


async def test_an_unstreamed_result_equals_the_stream(wide_ring):
    async with AsyncClient(wide_ring.address, timeout=90) as client:
        for i in range(10):
            result = await client.generate(**request(i))
            outputs = {output.index: (output.text, str(output.finish_reason)) for output in result.outputs}
            assert outputs == {index: end[:2] for index, end in (await streamed(client, request(i))).items()}


@pytest.mark.quick(1)
@pytest.mark.parametrize("n", [1, 3])
async def test_cancelling_streams_in_the_middle_frees_every_block(wide_ring, n):
    async def cancelled(client: AsyncClient, i: int) -> None:
        chunks = 0
        async with client.stream(f"# file {i}\nimport ", max_tokens=1500, ignore_eos=True, seed=i, n=n) as stream:
            async for _ in stream:
                chunks += 1
                if chunks > 1 + i % 11:
                    break

    async with AsyncClient(wide_ring.address, timeout=90) as client:
        await asyncio.gather(*(cancelled(client, i) for i in range(STREAMS)))
        stats = await stats_until(client, nothing_held)
        assert nothing_held(stats), stats
        assert all(engine.free_kv_blocks == engine.max_kv_blocks for engine in stats.engines)
