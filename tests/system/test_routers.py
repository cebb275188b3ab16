"""A router that dies or restarts under live streams: the clients go on at the other, and nobody can tell."""

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


async def play(client: AsyncClient, i: int, begun: Callable[[], None]) -> tuple[dict[int, JoinedOutput], int]:
    """What stream number i told, and how often it was resumed."""
    options = {"max_tokens": 400, "ignore_eos": True} | OPTIONS[i % len(OPTIONS)]
    stream = client.stream(f"# {i}\ndef ", timeout=LIMIT, **options)
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == 20:
            begun()
    assert stream.usage.completion_tokens == sum(output.tokens for output in join(chunks).values())
    return join(chunks), stream.resumed


async def play_all(
    client: AsyncClient, disturb: Callable[[], None] | None
) -> tuple[list[dict[int, JoinedOutput]], int]:
    begun = asyncio.Semaphore(0)
    streams = [asyncio.create_task(play(client, i, begun.release)) for i in range(len(OPTIONS))]
    if disturb is not None:
        for _ in streams:
            await begun.acquire()
        await asyncio.to_thread(disturb)
    found = await asyncio.gather(*streams)
    return [told for told, _ in found], sum(resumed for _, resumed in found)


async def serving(address: str) -> None:
    end = time.monotonic() + LIMIT
    async with AsyncClient(address) as client:
        while time.monotonic() < end:
            with suppress(Unavailable):
                if await client.health():
                    return
            await asyncio.sleep(0.1)
    raise AssertionError(f"{address} does not come back")


def approximately(told: dict[int, JoinedOutput]) -> dict:
    return {index: (output.text, output.token_ids, output.tokens, output.ends[0][:4]) for index, output in told.items()}


def logprobs(told: dict[int, JoinedOutput]) -> list[float]:
    return [entry.logprob for _, output in sorted(told.items()) for entry in output.logprobs]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["kill", "restart"])
async def test_streams_survive_their_router(two, how) -> None:
    resumed = 0
    async with AsyncClient(two.addresses) as client:
        calm, _ = await play_all(client, None)
        for router in ("router-0", "router-1"):

            def disturb(router: str = router) -> None:
                if how == "kill":
                    os.kill(two.pids[router], signal.SIGKILL)
                else:
                    two.restart(router)

            told, count = await play_all(client, disturb)
            resumed += count
            assert list(map(approximately, told)) == list(map(approximately, calm))
            assert [logprobs(each) for each in told] == [pytest.approx(logprobs(each), abs=1e-4) for each in calm]
            for address in two.addresses:
                await serving(address)
    if how == "kill":
        # All are at one router, so one of the two deaths was theirs.
        assert resumed >= len(OPTIONS)


@pytest.mark.timeout(300)
def test_a_whole_answer_is_asked_for_again(two) -> None:
    with Client(two.addresses) as client:
        expected = client.generate("def ", seed=1, max_tokens=100, ignore_eos=True)
        os.kill(two.pids["router-0"], signal.SIGKILL)
        again = client.generate("def ", seed=1, max_tokens=100, ignore_eos=True)
    assert again.outputs == expected.outputs
