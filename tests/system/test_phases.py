"""Prefill and decode apart, on a real ring: the same text as from engines that compute everything."""

import asyncio
import os
import signal

import pytest

from sluice import AsyncClient, Client
from sluice.launch import LogLine, Ring
from tests.fakes.processes import LIMIT, wait_until

pytestmark = pytest.mark.timeout(300)

TEXT = "def fibonacci(n):\n    return n\n\n" * 40
"""More tokens than `HAND_OVER_TOKENS`."""
REQUESTS = [
    {"temperature": 0},
    {"seed": 5, "n": 2, "logprobs": 2},
    {"seed": 6, "stop": ["return"], "min_tokens": 24},
    {"temperature": 0, "guided": {"regex": "[a-z ]{60}"}},
]
OPTIONS = {"max_tokens": 160, "ignore_eos": True, "token_ids": True}
ENGINES = ("engine-prefill-0", "engine-decode-0")


def prompt(number: int) -> str:
    return f"# {number}\n{TEXT}"


def options(number: int) -> dict:
    return REQUESTS[number % len(REQUESTS)] | OPTIONS


def outputs(result) -> list[tuple]:
    return [(output.index, output.text, list(output.token_ids), output.finish_reason) for output in result.outputs]


@pytest.fixture(scope="module")
def expected(ring) -> list[list[tuple]]:
    """From an engine that computes everything."""
    with Client(ring.address, timeout=LIMIT) as client:
        return [outputs(client.generate(prompt(number), **options(number))) for number in range(8)]


@pytest.fixture(scope="module")
def log_lines() -> list[LogLine]:
    return []


@pytest.fixture(scope="module")
def divided(log_lines):
    settings = {"detokenizers": 1, "router_args": {"peer_timeout": 15.0}}
    with Ring(prefill_engines=1, decode_engines=1, observe=log_lines.append, **settings) as ring:
        yield ring


def ended(log_lines: list[LogLine]) -> list[dict]:
    return [line.fields for line in log_lines if line.event == "request_ended"]


def test_requests_are_handed_over_with_the_same_result(divided, expected, log_lines):
    before = len(ended(log_lines))
    with Client(divided.address, timeout=LIMIT) as client:
        results = [outputs(client.generate(prompt(number), **options(number))) for number in range(4)]
    assert results == expected[:4]
    assert wait_until(lambda: len(ended(log_lines)) == before + 4)
    lines = ended(log_lines)[before:]
    assert {(line["prefill_engine"], line["engine"], line["attempts"]) for line in lines} == {(*ENGINES, 2)}


@pytest.mark.parametrize("engine", [ENGINES[0], *(pytest.param(name, marks=pytest.mark.long) for name in ENGINES[1:])])
async def test_a_death_on_either_side_changes_nothing(divided, expected, engine):
    """While some requests have been handed over and others have not."""
    async with AsyncClient(divided.address, timeout=LIMIT) as client:
        begun = asyncio.Event()

        async def generate(number: int) -> list[tuple]:
            await asyncio.sleep(0.15 * number)
            texts: dict[int, list] = {}
            async for chunk in client.stream(prompt(number), **options(number)):
                text = texts.setdefault(chunk.index, ["", [], None])
                text[0] += chunk.text
                text[1] += chunk.token_ids
                text[2] = chunk.finish_reason or text[2]
                begun.set()
            return [(index, *text) for index, text in sorted(texts.items())]

        streams = [asyncio.ensure_future(generate(number)) for number in range(8)]
        await asyncio.wait_for(begun.wait(), LIMIT)
        os.kill(divided.pids[engine], signal.SIGKILL)
        assert await asyncio.gather(*streams) == expected
    # Both engines serve again before the next test.
    with Client(divided.address, timeout=LIMIT) as client:
        assert wait_until(lambda: len(client.stats().engines) == len(ENGINES))
