"""A router dies or restarts while it serves streams: clients resume them at the other router, unchanged."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from sluice import AsyncClient, Client
from sluice.client import Unavailable
from sluice.launch import Ring
from tests.client.joined import JoinedOutput, join

LIMIT = 120
OPTIONS: list[dict] = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "n": 2, "logprobs": 1},
    {"seed": 3, "token_ids": True, "frequency_penalty": 0.5},
    {"seed": 4, "stop": ["def return_nothing"], "echo": True},
    {"temperature": 0, "repetition_penalty": 1.1, "logprobs": 0},
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ring]:
    with Ring(routers=2, engines=1, detokenizers=1) as ring:
        yield ring


async def stream(client: AsyncClient, i: int, begun: Callable[[], None]) -> tuple[dict[int, JoinedOutput], int]:
    """Read stream number i, and call `begun` after its first chunks. Returns how often it was resumed, too."""
    options = {"max_tokens": 400, "ignore_eos": True} | OPTIONS[i % len(OPTIONS)]
    reading = client.stream(f"# {i}\ndef ", timeout=LIMIT, **options)
    chunks = []
    async for chunk in reading:
        chunks.append(chunk)
        if len(chunks) == 20:
            begun()
    assert reading.usage.completion_tokens == sum(output.tokens for output in join(chunks).values())
    return join(chunks), reading.resumed


async def stream_all(
    client: AsyncClient, disturb: Callable[[], None] | None
) -> tuple[list[dict[int, JoinedOutput]], int]:
    """Run all streams, and call `disturb` once all have begun. Returns their outputs and the number of resumptions."""
    begun = asyncio.Semaphore(0)
    streams = [asyncio.create_task(stream(client, i, begun.release)) for i in range(len(OPTIONS))]
    if disturb is not None:
        for _ in streams:
            await begun.acquire()
        await asyncio.to_thread(disturb)
    results = await asyncio.gather(*streams)
    return [outputs for outputs, _ in results], sum(resumed for _, resumed in results)


async def until_serving(address: str) -> None:
    deadline = time.monotonic() + LIMIT
    async with AsyncClient(address) as client:
        while time.monotonic() < deadline:
            with suppress(Unavailable):
                if await client.health():
                    return
            await asyncio.sleep(0.1)
    raise AssertionError(f"{address} does not serve again")


def without_logprobs(outputs: dict[int, JoinedOutput]) -> dict:
    return {i: (output.text, output.token_ids, output.tokens, output.ends[0][:4]) for i, output in outputs.items()}


def logprobs(outputs: dict[int, JoinedOutput]) -> list[float]:
    return [entry.logprob for _, output in sorted(outputs.items()) for entry in output.logprobs]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.long), "restart"])
async def test_streams_survive_the_death_and_restart_of_their_router(two, how) -> None:
    resumed = 0
    async with AsyncClient(two.addresses) as client:
        undisturbed, _ = await stream_all(client, None)
        for router in ("router-0", "router-1"):

            def disturb(router: str = router) -> None:
                if how == "kill":
                    os.kill(two.pids[router], signal.SIGKILL)
                else:
                    two.restart(router)

            disturbed, count = await stream_all(client, disturb)
            resumed += count
            assert list(map(without_logprobs, disturbed)) == list(map(without_logprobs, undisturbed))
            for actual, expected in zip(disturbed, undisturbed, strict=True):
                assert logprobs(actual) == pytest.approx(logprobs(expected), abs=1e-4)
            for address in two.addresses:
                await until_serving(address)
    if how == "kill":
        # All streams go through one router, so that one of the two kills has hit all of them.
        assert resumed >= len(OPTIONS)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_unstreamed_request_is_repeated_at_the_other_router(two) -> None:
    with Client(two.addresses) as client:
        expected = client.generate("def ", seed=1, max_tokens=100, ignore_eos=True)
        os.kill(two.pids["router-0"], signal.SIGKILL)
        repeated = client.generate("def ", seed=1, max_tokens=100, ignore_eos=True)
    assert repeated.outputs == expected.outputs
