"""A process that dies or freezes under live streams: the router goes on with them elsewhere, and no client notices."""

import asyncio
import os
import signal
from dataclasses import dataclass, field

import grpc
import pytest

from bench.deaths.freeze import Leftovers, leftovers
from sluice import AsyncClient
from sluice.launch import Ring
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import OutputOptions
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from sluice.v1.sampling_pb2 import SamplingParams, StoppingCriteria

PEER_TIMEOUT = 5.0
"""Seconds: those that live must not be taken for dead on a machine that has much else to do."""
STREAMS = 8
TOKENS = 480
BEGUN = 8
"""Tokens of a stream that has begun."""
NOTHING = Leftovers([])


@pytest.fixture(scope="module")
def pairs():
    with Ring(engines=2, detokenizers=2, router_args={"peer_timeout": PEER_TIMEOUT}) as ring:
        yield ring


@pytest.fixture
async def doomed_ring(pairs):
    """Whole again after the test before."""
    async with AsyncClient(pairs.address, timeout=200) as client:
        assert await leftovers(client, pairs) == NOTHING
    return pairs


@pytest.fixture(scope="module")
def lone_ring():
    with Ring(engines=1, detokenizers=1, router_args={"peer_timeout": PEER_TIMEOUT}) as ring:
        yield ring


@pytest.fixture(scope="module")
def calm() -> list["Stories"]:
    """What the streams bring undisturbed: the same from any ring, so the first one that is asked tells it for all."""
    return []


def spec(i: int) -> pb.GenerationSpec:
    """Greedy, seeded, two outputs, stop strings, penalties and logprobs, in turns."""
    kinds = [
        {"sampling": SamplingParams(temperature=0)},
        {"sampling": SamplingParams(seed=i)},
        {"sampling": SamplingParams(seed=i), "n": 2},
        {"sampling": SamplingParams(seed=i, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2)},
    ]
    output = OutputOptions(token_ids=True, logprobs=2 if i % 3 == 0 else None)
    stop = ["return x\n", "\n\n\n\n"] if i % 4 == 1 else []
    stopping = StoppingCriteria(max_tokens=TOKENS, ignore_eos=True, stop=stop, min_tokens=TOKENS // 2 if stop else 0)
    return pb.GenerationSpec(text=f"# {i}\ndef f(x):\n", output=output, stopping=stopping, **kinds[i % len(kinds)])


@dataclass
class Story:
    """One output as its client saw it."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list, compare=False)
    end: tuple[int, str, int] | None = None


Stories = dict[int, Story]
"""By output."""


async def stories(stub, i: int, begun: asyncio.Semaphore) -> Stories:
    """Checks numbers and offsets on the way."""
    found: Stories = {}
    number = 0
    async for event in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec(i)), timeout=200):
        number += 1
        assert event.sequence == number
        if event.HasField("delta"):
            delta, story = event.delta, found.setdefault(event.delta.index, Story())
            assert delta.token_offset == len(story.ids)
            had = len(story.ids)
            story.text += delta.text
            story.ids += delta.token_ids
            story.logprobs += [logprob.logprob for logprob in delta.logprobs]
            # However many tokens come at once: a late reader gets all that there are.
            if delta.index == 0 and had < BEGUN <= len(story.ids):
                begun.release()
        elif event.HasField("finished"):
            finished, story = event.finished, found[event.finished.index]
            assert story.end is None
            story.end = (finished.finish_reason, finished.stop_string, finished.completion_tokens)
            assert finished.completion_tokens == len(story.ids)
    assert event.HasField("done")
    return found


async def check_same(ring, calm, disturb):
    """Streams that are disturbed bring what they bring undisturbed."""
    async with grpc.aio.insecure_channel(ring.address) as channel:
        stub = GenerationServiceStub(channel)
        if not calm:
            calm += await asyncio.gather(*(stories(stub, i, asyncio.Semaphore(0)) for i in range(STREAMS)))
        begun = asyncio.Semaphore(0)
        streams = [asyncio.ensure_future(stories(stub, i, begun)) for i in range(STREAMS)]
        for _ in range(STREAMS):
            await begun.acquire()
        assert not all(stream.done() for stream in streams)
        await disturb()
        found = await asyncio.gather(*streams)
    for before, after in zip(calm, found, strict=True):
        assert before == after
        for index in before:
            assert after[index].logprobs == pytest.approx(before[index].logprobs, abs=1e-3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["engine-0", "detok-1"])
async def test_streams_go_on_elsewhere(doomed_ring, calm, victim, death):
    ring = doomed_ring
    pid = ring.pids[victim]

    async def die():
        os.kill(pid, death)

    await check_same(ring, calm, die)
    async with AsyncClient(ring.address, timeout=200) as client:
        assert await leftovers(client, ring, but=[victim]) == NOTHING
        if death is signal.SIGSTOP:
            # What it still says of the streams that went on elsewhere changes nothing.
            os.kill(pid, signal.SIGCONT)
            assert await leftovers(client, ring) == NOTHING


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["engine-0", "detok-0"])
async def test_alone_it_is_restarted_and_the_streams_wait_for_it(lone_ring, calm, victim):
    async def die():
        os.kill(lone_ring.pids[victim], signal.SIGKILL)

    await check_same(lone_ring, calm, die)
    async with AsyncClient(lone_ring.address, timeout=200) as client:
        assert await leftovers(client, lone_ring) == NOTHING
