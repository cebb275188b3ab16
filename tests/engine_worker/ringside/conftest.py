"""A fixture that starts workers, and closes them when the test ends."""

import pytest

from tests.engine_worker.ringside.world import World
from tests.fakes.runner import ScriptedRunner


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner(num_blocks=16, tokens_per_block=4)


@pytest.fixture
def start(tmp_path, runner, monkeypatch):
    # The tests' router sends one hello or none: it must not count as silent.
    monkeypatch.setattr("engine_worker.ringside.orphans.CHECK_SECONDS", 3600.0)
    monkeypatch.setattr("engine_worker.ringside.heartbeats.ROUTER_SILENCE_SECONDS", 3600.0)
    worlds = []

    def start(**settings) -> World:
        worlds.append(World(tmp_path, runner, **settings))
        return worlds[-1]

    yield start
    for world in worlds:
        world.close()
