"""A process dies or freezes while it serves streams: the router recovers them, and no client notices."""

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
"""Seconds; long enough that a busy machine makes no live peer count as lost."""
STREAMS = 8
TOKENS = 240
BEGUN = 8
"""Number of tokens after which the disturbance may begin."""
NOTHING = Leftovers([])


@pytest.fixture(scope="module")
def pairs():
    with Ring(engines=2, detokenizers=2, router_args={"peer_timeout": PEER_TIMEOUT}) as ring:
        yield ring


@pytest.fixture
async def doomed_ring(pairs):
    """`pairs` once it has recovered from the previous test."""
    async with AsyncClient(pairs.address, timeout=200) as client:
        assert await leftovers(client, pairs) == NOTHING
    return pairs


@pytest.fixture(scope="module")
def lone_ring():
    with Ring(engines=1, detokenizers=1, router_args={"peer_timeout": PEER_TIMEOUT}) as ring:
        yield ring


@pytest.fixture(scope="module")
def undisturbed() -> list["Outputs"]:
    """The undisturbed streams. The first test fills in the list; they are the same on every ring."""
    return []


def spec(i: int) -> pb.GenerationSpec:
    """Requests that are greedy or seeded, with two outputs, stop strings, penalties or logprobs, in turn."""
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
class Output:
    """An output as the client received it."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list, compare=False)
    end: tuple[int, str, int] | None = None


Outputs = dict[int, Output]
"""Outputs of a request by index."""


async def stream(stub, i: int, begun: asyncio.Semaphore) -> Outputs:
    """Read a stream, and check its sequence numbers and offsets. Releases `begun` after the first tokens."""
    outputs: Outputs = {}
    number = 0
    async for event in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec(i)), timeout=200):
        number += 1
        assert event.sequence == number
        if event.HasField("delta"):
            delta, output = event.delta, outputs.setdefault(event.delta.index, Output())
            assert delta.token_offset == len(output.ids)
            former_length = len(output.ids)
            output.text += delta.text
            output.ids += delta.token_ids
            output.logprobs += [logprob.logprob for logprob in delta.logprobs]
            # A delta may contain many tokens, if the client reads slowly.
            if delta.index == 0 and former_length < BEGUN <= len(output.ids):
                begun.release()
        elif event.HasField("finished"):
            finished, output = event.finished, outputs[event.finished.index]
            assert output.end is None
            output.end = (finished.finish_reason, finished.stop_string, finished.completion_tokens)
            assert finished.completion_tokens == len(output.ids)
    assert event.HasField("done")
    return outputs


async def check_streams_are_unchanged(ring, undisturbed, disturb):
    """Streams that are disturbed in the middle equal the undisturbed ones."""
    async with grpc.aio.insecure_channel(ring.address) as channel:
        stub = GenerationServiceStub(channel)
        if not undisturbed:
            undisturbed += await asyncio.gather(*(stream(stub, i, asyncio.Semaphore(0)) for i in range(STREAMS)))
        begun = asyncio.Semaphore(0)
        streams = [asyncio.ensure_future(stream(stub, i, begun)) for i in range(STREAMS)]
        for _ in range(STREAMS):
            await begun.acquire()
        assert not all(task.done() for task in streams)
        await disturb()
        disturbed = await asyncio.gather(*streams)
    for expected, actual in zip(undisturbed, disturbed, strict=True):
        assert actual == expected
        for index in expected:
            assert actual[index].logprobs == pytest.approx(expected[index].logprobs, abs=1e-3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("victim", "death"),
    [
        pytest.param("engine-0", signal.SIGKILL, marks=pytest.mark.long),
        ("detok-1", signal.SIGSTOP),
        pytest.param("engine-0", signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param("detok-1", signal.SIGKILL, marks=pytest.mark.long),
    ],
)
async def test_streams_continue_on_another_peer(doomed_ring, undisturbed, victim, death):
    ring = doomed_ring
    pid = ring.pids[victim]

    async def die():
        os.kill(pid, death)

    await check_streams_are_unchanged(ring, undisturbed, die)
    async with AsyncClient(ring.address, timeout=200) as client:
        assert await leftovers(client, ring, but=[victim]) == NOTHING
        if death is signal.SIGSTOP:
            # Rows that it still sends for streams that have moved are ignored.
            os.kill(pid, signal.SIGCONT)
            assert await leftovers(client, ring) == NOTHING


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["engine-0", "detok-0"])
@pytest.mark.long
async def test_streams_wait_for_the_restart_of_the_only_peer(lone_ring, undisturbed, victim):
    async def die():
        os.kill(lone_ring.pids[victim], signal.SIGKILL)

    await check_streams_are_unchanged(lone_ring, undisturbed, die)
    async with AsyncClient(lone_ring.address, timeout=200) as client:
        assert await leftovers(client, lone_ring) == NOTHING
