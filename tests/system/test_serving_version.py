"""A rolling update by SetServingVersion: a real ring whose engines have two versions of a model."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from sluice import AsyncClient, Client
from sluice.client import ModelChanged, ModelNotFound
from sluice.launch import Ring
from tests.fakes.processes import LIMIT, wait_until
from tests.system.two_models import PROMPT, SPEC, STREAMS, Streams, kill, make_checkpoints, point

pytestmark = pytest.mark.timeout(400)

START = 40
"""Number of tokens by which the texts of the two versions differ."""


@dataclass
class Update:
    """A ring with two routers and one engine of each version: `engine-0` of v1, `engine-1` of v2."""

    ring: Ring
    model: Path
    settings: Path
    checkpoints: dict[str, Path]

    def prepare(self, version: str) -> None:
        """Engines that start from now on have this version."""
        point(self.model, self.checkpoints[version])
        self.settings.write_text(f"model_version: {version}\n")

    async def restart(self, engine: str, version: str) -> None:
        """Kill an engine, which the launcher then restarts with this version."""
        self.prepare(version)
        kill(self.ring, engine)

    async def wait_for(self, **versions: str) -> None:
        """Wait until every router knows these engines with these versions."""
        expected = {engine.replace("_", "-"): version for engine, version in versions.items()}
        for address in self.ring.addresses:
            with Client(address, timeout=LIMIT) as client:
                assert await asyncio.to_thread(wait_until, lambda client=client: _versions(client) == expected)

    async def starts(self) -> set[str]:
        """The beginnings of texts of new requests, two concurrent ones at each router."""
        spec = {**SPEC, "max_tokens": START}
        async with AsyncExitStack() as stack:
            clients = [AsyncClient(address, timeout=LIMIT) for address in self.ring.addresses]
            for client in clients:
                await stack.enter_async_context(client)
            results = await asyncio.gather(*(client.generate(PROMPT, **spec) for client in 2 * clients))
            return {result.text for result in results}

    async def serve(self, client: AsyncClient, version: str) -> list[str | None]:
        """Set the serving version at every router. Returns the former versions."""
        answers = await client.set_serving_version(version, timeout=LIMIT)
        expected = [(address, version) for address in self.ring.addresses]
        assert [(answer.address, answer.version) for answer in answers] == expected
        return [answer.former for answer in answers]


def _versions(client: Client) -> dict[str, str]:
    return {engine.engine_id: engine.model_version for engine in client.stats().engines}


@pytest.fixture
async def update(tmp_path):
    """The ring before the update: the routers' setting sends new requests to v1."""
    old, new = make_checkpoints(tmp_path)
    model, settings = tmp_path / "model", tmp_path / "engine.yaml"
    engine = {"threads": 1, "kv_cache_tokens": 16384, "config": str(settings)}
    router = {"peer_timeout": 15.0, "serving_version": "v1"}
    point(model, old)
    settings.write_text("model_version: v1\n")
    with Ring(model, name="tiny", routers=2, engines=2, detokenizers=1, engine_args=engine, router_args=router) as ring:
        update = Update(ring, model, settings, {"v1": old, "v2": new})
        await update.restart("engine-1", "v2")
        await update.wait_for(engine_0="v1", engine_1="v2")
        yield update


@pytest.mark.long
async def test_an_update_and_its_reversal_move_only_new_requests(update):
    async with AsyncClient(update.ring.addresses) as client:
        (old_start,) = await update.starts()
        old_text = (await client.generate(PROMPT, **SPEC)).text
        assert old_text.startswith(old_start)
        old = Streams(client)
        await old.until_begun()
        assert await update.serve(client, "v2") == ["v1", "v1"]
        assert old.running == STREAMS
        (new_start,) = await update.starts()
        assert new_start != old_start
        new = Streams(client)
        await new.until_begun()
        refused = await client.set_serving_version("v3")
        assert all(isinstance(answer.error, ModelNotFound) for answer in refused)
        assert await update.serve(client, "v1") == ["v2", "v2"]
        assert new.running == STREAMS
        assert await update.starts() == {old_start}
        await asyncio.gather(old.ended(), new.ended())
    assert old.errors == new.errors == [None] * STREAMS
    (new_text,) = set(new.texts)
    assert set(old.texts) == {old_text}
    assert new_text.startswith(new_start)


@pytest.mark.long
async def test_streams_wait_for_the_restart_of_the_only_engine_of_their_version(update):
    """If it is restarted with another version, they end with ModelChanged."""
    async with AsyncClient(update.ring.addresses) as client:
        old_text = (await client.generate(PROMPT, **SPEC)).text
        waiting = Streams(client)
        await waiting.until_begun()
        await update.serve(client, "v2")
        await update.restart("engine-0", "v1")
        (new_start,) = await update.starts()
        assert not old_text.startswith(new_start)
        await waiting.ended()
        assert waiting.errors == [None] * STREAMS
        assert set(waiting.texts) == {old_text}

        await update.serve(client, "v1")
        replaced = Streams(client)
        await replaced.until_begun()
        await update.serve(client, "v2")
        await update.restart("engine-0", "v2")
        await replaced.ended()
        assert all(isinstance(error, ModelChanged) for error in replaced.errors)
        assert all(text and old_text.startswith(text) for text in replaced.texts)
        assert await update.starts() == {new_start}
        refused = await client.set_serving_version("v1")
        assert all(isinstance(answer.error, ModelNotFound) for answer in refused)
