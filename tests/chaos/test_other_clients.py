"""OpenAI's client of a real model whose engines have pool files: its streams do not notice that an engine is killed."""

import asyncio
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from bench.deaths.precisions import PRECISIONS
from sluice import AsyncClient
from sluice.launch import Ring
from tests.chaos.disturbed_streams import PROMPT
from tests.fakes.ports import free_ports
from tests.fakes.processes import LIMIT

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

PEER_TIMEOUT = 5.0
"""Seconds; long enough that a busy machine makes no live peer count as lost."""
TOKENS, BEGUN = 160, 20
CHATS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.9, "seed": 2}]


@pytest.fixture(scope="module", params=["float32", "int8"])
def ring(request: pytest.FixtureRequest, real_model: Path) -> Iterator[Ring]:
    port = free_ports(2)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sluice-test-") as folder:
        engine = {"kv_folder": folder, "kv_cache_tokens": 12_000, "backend": "openvino", **PRECISIONS[request.param]}
        options = {"router_args": {"peer_timeout": PEER_TIMEOUT}, "engine_args": engine}
        with Ring(engines=2, detokenizers=1, model=real_model, port=port, http_port=port + 1, **options) as ring:
            yield ring


async def chat(client: AsyncOpenAI, options: dict, begun: asyncio.Semaphore) -> tuple[str, str | None]:
    """The answer, and why it ended. Releases `begun` once, after the first tokens."""
    messages = [{"role": "user", "content": f"{PROMPT}\nWhat do these functions return?"}]
    text, reason, chunks = "", None, 0
    fields = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}, **options}
    (model,) = [each.id async for each in client.models.list()]
    async for chunk in await client.chat.completions.create(model=model, messages=messages, stream=True, **fields):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        chunks += 1
        if chunks == BEGUN:
            begun.release()
    return text, reason


async def busiest(ring: Ring) -> str:
    """The engine of most of the open requests."""
    async with AsyncClient(ring.addresses) as client:
        stats = await client.stats()
    ((name, _),) = Counter(each.engine_id for each in stats.requests if each.open).most_common(1)
    return name


async def test_streams_of_openais_client_survive_the_death_of_their_engine(ring: Ring) -> None:
    address = f"http://{ring.http_address}/v1"
    async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=3 * LIMIT) as client:
        undisturbed = await asyncio.gather(*(chat(client, options, asyncio.Semaphore(0)) for options in CHATS))
        assert {reason for _, reason in undisturbed} == {"length"}
        begun = asyncio.Semaphore(0)
        chats = [asyncio.create_task(chat(client, options, begun)) for options in CHATS]
        for _ in chats:
            await begun.acquire()
        assert not any(each.done() for each in chats)
        os.kill(ring.pids[await busiest(ring)], signal.SIGKILL)
        assert await asyncio.gather(*chats) == undisturbed
