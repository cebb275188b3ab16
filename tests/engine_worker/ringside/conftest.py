"""Fixtures: workers, which are closed when the test ends; a clock, and a receiver of lanes in memory."""

import pytest

from tests.engine_worker.ringside.world import World
from tests.fakes.clock import Clock
from tests.fakes.lane import Receiver
from tests.fakes.runner import ScriptedRunner


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner(num_blocks=16, tokens_per_block=4)


@pytest.fixture
def start(tmp_path, runner, monkeypatch):
    # The tests' router sends one hello or none: it must not count as silent.
    monkeypatch.setattr("engine_worker.ringside.mailbox.CHECK_SECONDS", 3600.0)
    monkeypatch.setattr("engine_worker.ringside.heartbeats.ROUTER_SILENCE_SECONDS", 3600.0)
    worlds = []

    def start(**settings) -> World:
        worlds.append(World(tmp_path, runner, **settings))
        return worlds[-1]

    yield start
    for world in worlds:
        world.close()
