"""KV cache events of a real ring: the examples, flushes, and an engine that is killed."""

import os
import re
import signal
from pathlib import Path

import pytest

from sluice import Client
from sluice.launch import Ring
from sluice.v1 import admin_pb2
from tests.system.test_examples import run

PAGE = Path(__file__).parents[2] / "docs" / "kv_cache.md"
BLOCK = 16
PROMPT = list(range(100, 150))
PATIENCE = 120.0


@pytest.fixture(scope="module")
def ring():
    settings = {"tokens_per_block": BLOCK, "kv_event_buffer": 1000, "kv_cache_tokens": 2048, "max_batch_size": 4}
    with Ring(engines=1, detokenizers=1, engine_args=settings) as ring:
        yield ring


@pytest.fixture(scope="module")
def client(ring):
    with Client(ring.address, timeout=PATIENCE) as client:
        yield client


def generate(client, prompt) -> None:
    client.generate(prompt, max_tokens=2, temperature=0.0, ignore_eos=True)


def read(responses, until) -> list:
    events = []
    while not any(until(event) for event in events):
        events += next(responses).events
    return events


def test_the_example_of_the_page_reconstructs_the_cache(ring, client):
    following, naming = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    generate(client, PROMPT)
    # `exec` is safe here: the page is part of this repository.
    names = {"address": ring.address}
    exec(following, names)
    assert list(names["blocks"].values()) == [PROMPT[start : start + BLOCK] for start in range(0, 48, BLOCK)]
    (engine,) = client.stats().engines
    naming_names = {
        "fingerprint": engine.model_fingerprint,
        "token_ids": PROMPT,
        "tokens_per_block": engine.tokens_per_kv_block,
    }
    exec(naming, naming_names)
    assert naming_names["hashes"] == list(names["blocks"])


def test_the_python_example_prints_events(ring, client):
    prompt = "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"
    first, *lines = run("cache_events.py", ring.address, prompt).stdout.splitlines()
    (blocks,) = re.fullmatch(rf"the prompt has (\d+) different blocks of {BLOCK} tokens", first).groups()
    assert int(blocks) > 1
    assert [line for line in lines if line.startswith("engine-0 0: created")]
    assert [line for line in lines if re.fullmatch(r"engine-0 \d+: stored [0-9a-f]{16} .def fibonacci.*", line)]


@pytest.mark.long
def test_events_start_from_zero_after_an_engine_was_killed(ring, client):
    generate(client, PROMPT)
    with client.stream_cache_events("engine-0", timeout=PATIENCE) as responses:
        first = next(responses)
        assert first.events[0].created.device_blocks == 2048 // BLOCK
        os.kill(ring.pids["engine-0"], signal.SIGKILL)
        generate(client, PROMPT)
        response = next(responses)
        while response.engine_epoch == first.engine_epoch:
            response = next(responses)
        events = list(response.events)
        assert (events[0].event_id, events[0].dropped) == (0, 0)
        assert events[0].created.device_blocks == 2048 // BLOCK
        if not any(event.HasField("stored") for event in events):
            events += read(responses, lambda event: event.HasField("stored"))
        stored = [event.stored for event in events if event.HasField("stored")]
        assert list(stored[0].token_ids) == PROMPT[:BLOCK]
        assert not stored[0].HasField("parent_hash")


def test_a_flush_removes_all_stored_blocks(client):
    generate(client, [7, *PROMPT])
    with client.stream_cache_events(timeout=PATIENCE) as responses:
        client._routers.current.admin.FlushCache(admin_pb2.FlushCacheRequest())
        events = read(responses, lambda event: event.HasField("removed"))
    stored = {event.stored.block_hash for event in events if event.HasField("stored")}
    removed = {block for event in events for block in event.removed.block_hashes}
    assert removed == stored != set()
