"""A rolling update to other weights, by real services: a text is of one model, or its stream ends and says so."""

import asyncio
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice import AsyncClient, Client, tiny_model
from sluice.client import ModelChanged
from sluice.launch import LogLine, Ring
from tests.fakes.processes import LIMIT, wait_until

pytestmark = pytest.mark.timeout(400)

PROMPT = "def fibonacci(n):\n"
SPEC = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}
STREAMS = 6


@pytest.fixture
def checkpoints(tmp_path) -> tuple[Path, Path]:
    """The tiny model, and one with its tokenizer and other weights."""
    old, new = (shutil.copytree(tiny_model.path(), tmp_path / name) for name in ("old", "new"))
    noise = torch.Generator().manual_seed(0)
    tensors = load_file(new / "model.safetensors")
    for tensor in tensors.values():
        tensor += 0.02 * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    return old, new


@pytest.fixture
def told() -> list[LogLine]:
    return []


@pytest.fixture
def ring(tmp_path, checkpoints, told):
    """Three engines over a link to the old checkpoint."""
    model = tmp_path / "model"
    model.symlink_to(checkpoints[0])
    settings = {"engine_args": {"threads": 1, "kv_cache_tokens": 16384}, "router_args": {"peer_timeout": 3.0}}
    with Ring(model, name="tiny", engines=3, detokenizers=1, observe=told.append, **settings) as ring:
        yield ring


class Streams:
    """Some of them at once, that have begun."""

    def __init__(self, client: AsyncClient) -> None:
        self.texts = [""] * STREAMS
        self.errors: list[Exception | None] = [None] * STREAMS
        self.begun = asyncio.Semaphore(0)
        self._tasks = [asyncio.create_task(self._read(client, number)) for number in range(STREAMS)]

    async def _read(self, client: AsyncClient, number: int) -> None:
        chunks = 0
        try:
            async for chunk in client.stream(PROMPT, **SPEC):
                self.texts[number] += chunk.text
                chunks += 1
                if chunks == 5:
                    self.begun.release()
        except ModelChanged as error:
            self.errors[number] = error

    async def until_begun(self) -> None:
        async with asyncio.timeout(LIMIT):
            for _ in range(STREAMS):
                await self.begun.acquire()

    async def ended(self) -> None:
        async with asyncio.timeout(2 * LIMIT):
            await asyncio.gather(*self._tasks)


def fingerprints(client: Client) -> dict[str, str]:
    return {engine.engine_id: engine.model_fingerprint for engine in client.stats().engines}


def kill(ring: Ring, engine: str) -> None:
    os.kill(ring.pids[engine], signal.SIGKILL)


async def test_an_update_to_other_weights(ring, checkpoints, told):
    old, new = checkpoints
    with Client(ring.address, timeout=LIMIT) as client:

        def texts(count: int) -> set[str]:
            """Of so many requests at once."""
            with ThreadPoolExecutor(count) as pool:
                answers = [pool.submit(client.generate, PROMPT, **SPEC) for _ in range(count)]
                return {answer.result().text for answer in answers}

        def served(*of_new: str) -> bool:
            found = fingerprints(client)
            return found.keys() == {"engine-0", "engine-1", "engine-2"} and of_new == tuple(
                sorted(engine for engine, model in found.items() if model != old_model)
            )

        (old_text,), (old_model,) = texts(6), set(fingerprints(client).values())
        link = old.parent / "link"
        link.symlink_to(new)
        link.replace(old.parent / "model")
        kill(ring, "engine-0")
        assert wait_until(lambda: served("engine-0"))
        assert texts(6) == {old_text}
        async with AsyncClient(ring.address) as streaming:
            # Its streams go on at the other engine with the old weights, though one with the new ones idles.
            moved = Streams(streaming)
            await moved.until_begun()
            kill(ring, "engine-1")
            await moved.ended()
            assert moved.errors == [None] * STREAMS
            assert set(moved.texts) == {old_text}
            assert await asyncio.to_thread(wait_until, lambda: served("engine-0", "engine-1"))
            (new_text,) = texts(6)
            assert new_text != old_text
        assert client.stats().serving_model_fingerprint not in ("", old_model)
    assert any(line.event == "models_diverged" for line in told)


async def test_the_last_engine_with_the_old_weights(ring, checkpoints, told):
    old, new = checkpoints
    with Client(ring.address, timeout=LIMIT) as client:
        old_text = client.generate(PROMPT, **SPEC).text
        async with AsyncClient(ring.address) as streaming:
            streams = Streams(streaming)
            await streams.until_begun()
            link = old.parent / "link"
            link.symlink_to(new)
            link.replace(old.parent / "model")
            for engine in list(ring.pids):
                if engine.startswith("engine"):
                    kill(ring, engine)
            await streams.ended()
        assert all(isinstance(error, ModelChanged) for error in streams.errors)
        assert all(error.reason == "MODEL_CHANGED" for error in streams.errors)
        assert all(text and old_text.startswith(text) for text in streams.texts)
        new_texts = {client.generate(PROMPT, **SPEC).text for _ in range(3)}
        assert len(new_texts) == 1
        assert not old_text.startswith(new_texts.pop()[:100])
