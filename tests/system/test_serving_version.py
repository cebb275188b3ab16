"""A rolling update told to routers that run: two versions side by side, with weights that differ, by real services."""

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
"""Tokens after which the texts of the two versions differ."""


@dataclass
class Update:
    """Two routers, and an engine of each version: `engine-0` of v1, `engine-1` of v2."""

    ring: Ring
    model: Path
    settings: Path
    checkpoints: dict[str, Path]

    def prepare(self, version: str) -> None:
        """An engine that starts from now on is of this version."""
        point(self.model, self.checkpoints[version])
        self.settings.write_text(f"model_version: {version}\n")

    async def restart(self, engine: str, version: str) -> None:
        """Kill the engine; the launcher starts it again, with this version."""
        self.prepare(version)
        kill(self.ring, engine)

    async def wait_for(self, **versions: str) -> None:
        """Until every router knows these engines with these versions."""
        wanted = {engine.replace("_", "-"): version for engine, version in versions.items()}
        for address in self.ring.addresses:
            with Client(address, timeout=LIMIT) as client:
                assert await asyncio.to_thread(wait_until, lambda client=client: _versions(client) == wanted)

    async def starts(self) -> set[str]:
        """Of the texts of new requests, two at each router at once."""
        spec = {**SPEC, "max_tokens": START}
        async with AsyncExitStack() as stack:
            clients = [AsyncClient(address, timeout=LIMIT) for address in self.ring.addresses]
            for client in clients:
                await stack.enter_async_context(client)
            return {each.text for each in await asyncio.gather(*(c.generate(PROMPT, **spec) for c in 2 * clients))}

    async def send_to(self, client: AsyncClient, version: str) -> list[str | None]:
        """Tell every router; returns the former versions."""
        answers = await client.set_serving_version(version, timeout=LIMIT)
        assert [(each.address, each.version) for each in answers] == [(each, version) for each in self.ring.addresses]
        return [each.former for each in answers]


def _versions(client: Client) -> dict[str, str]:
    return {engine.engine_id: engine.model_version for engine in client.stats().engines}


@pytest.fixture
async def update(tmp_path):
    """New requests go to v1, by the routers' setting."""
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


async def test_there_and_back(update):
    async with AsyncClient(update.ring.addresses) as client:
        (old_start,) = await update.starts()
        old_text = (await client.generate(PROMPT, **SPEC)).text
        assert old_text.startswith(old_start)
        old = Streams(client)
        await old.until_begun()
        assert await update.send_to(client, "v2") == ["v1", "v1"]
        assert old.running == STREAMS
        (new_start,) = await update.starts()
        assert new_start != old_start
        new = Streams(client)
        await new.until_begun()
        refused = await client.set_serving_version("v3")
        assert all(isinstance(each.error, ModelNotFound) for each in refused)
        assert await update.send_to(client, "v1") == ["v2", "v2"]
        assert new.running == STREAMS
        assert await update.starts() == {old_start}
        await asyncio.gather(old.ended(), new.ended())
    assert old.errors == new.errors == [None] * STREAMS
    (new_text,) = set(new.texts)
    assert set(old.texts) == {old_text}
    assert new_text.startswith(new_start)


@pytest.mark.long
async def test_the_death_of_the_only_engine_of_the_old_version(update):
    """Its streams wait for it, with the old weights; where it has others, they end and say so."""
    async with AsyncClient(update.ring.addresses) as client:
        old_text = (await client.generate(PROMPT, **SPEC)).text
        waiting = Streams(client)
        await waiting.until_begun()
        await update.send_to(client, "v2")
        await update.restart("engine-0", "v1")
        (new_start,) = await update.starts()
        assert not old_text.startswith(new_start)
        await waiting.ended()
        assert waiting.errors == [None] * STREAMS
        assert set(waiting.texts) == {old_text}

        await update.send_to(client, "v1")
        replaced = Streams(client)
        await replaced.until_begun()
        await update.send_to(client, "v2")
        await update.restart("engine-0", "v2")
        await replaced.ended()
        assert all(isinstance(error, ModelChanged) for error in replaced.errors)
        assert all(text and old_text.startswith(text) for text in replaced.texts)
        assert await update.starts() == {new_start}
        refused = await client.set_serving_version("v1")
        assert all(isinstance(each.error, ModelNotFound) for each in refused)
