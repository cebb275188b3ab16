"""A rolling update to other weights on a real ring: no text mixes two models; if it would, the stream ends instead."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sluice import AsyncClient, Client
from sluice.client import ModelChanged
from sluice.launch import LogLine, Ring
from tests.fakes.processes import LIMIT, wait_until
from tests.system.two_models import PROMPT, SPEC, STREAMS, Streams, fingerprints, kill, make_checkpoints, point

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def checkpoints(tmp_path) -> tuple[Path, Path]:
    return make_checkpoints(tmp_path)


@pytest.fixture
def log_lines() -> list[LogLine]:
    return []


@pytest.fixture
def ring(tmp_path, checkpoints, log_lines):
    """Three engines whose model is a link to the old checkpoint."""
    model = tmp_path / "model"
    point(model, checkpoints[0])
    settings = {"engine_args": {"threads": 1, "kv_cache_tokens": 16384}, "router_args": {"peer_timeout": 15.0}}
    with Ring(model, name="tiny", engines=3, detokenizers=1, observe=log_lines.append, **settings) as ring:
        yield ring


@pytest.mark.long
async def test_streams_keep_their_weights_during_an_update(ring, checkpoints, log_lines):
    old, new = checkpoints
    with Client(ring.address, timeout=LIMIT) as client:

        def texts(count: int) -> set[str]:
            """Texts of `count` concurrent requests."""
            with ThreadPoolExecutor(count) as pool:
                answers = [pool.submit(client.generate, PROMPT, **SPEC) for _ in range(count)]
                return {answer.result().text for answer in answers}

        def have_new_weights(*engines: str) -> bool:
            models = fingerprints(client)
            updated = tuple(sorted(engine for engine, model in models.items() if model != old_model))
            return models.keys() == {"engine-0", "engine-1", "engine-2"} and updated == engines

        (old_text,), (old_model,) = texts(4), set(fingerprints(client).values())
        point(old.parent / "model", new)
        kill(ring, "engine-0")
        assert wait_until(lambda: have_new_weights("engine-0"))
        assert texts(4) == {old_text}
        async with AsyncClient(ring.address) as streaming:
            # Streams move to the other engine with the old weights, although one with the new weights is idle.
            moved = Streams(streaming)
            await moved.until_begun()
            kill(ring, "engine-1")
            await moved.ended()
            assert moved.errors == [None] * STREAMS
            assert set(moved.texts) == {old_text}
            assert await asyncio.to_thread(wait_until, lambda: have_new_weights("engine-0", "engine-1"))
            (new_text,) = texts(4)
            assert new_text != old_text
        assert client.stats().serving_model_fingerprint not in ("", old_model)
    assert any(line.event == "models_diverged" for line in log_lines)


@pytest.mark.long
async def test_streams_end_when_no_engine_has_their_weights(ring, checkpoints):
    old, new = checkpoints
    with Client(ring.address, timeout=LIMIT) as client:
        old_text = client.generate(PROMPT, **SPEC).text
        async with AsyncClient(ring.address) as streaming:
            streams = Streams(streaming)
            await streams.until_begun()
            point(old.parent / "model", new)
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
