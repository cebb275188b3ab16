"""The content of a worker's heartbeats, and that no step delays them."""

from dataclasses import replace

import pytest

from engine_worker.core.refusals import EngineLimits
from engine_worker.ringside.identity import why_context_is_limited
from sluice.settings.services import EngineSettings
from sluice.wire.hashing import block_chain, root_hash, short_hash
from sluice.wire.requests import Flush
from sluice.wire.stats import Stage, StepStats
from sluice.wire.timing import HEARTBEAT_SECONDS
from tests.engine_worker.ringside.world import CHECKPOINT, FINGERPRINT, LIMIT, stall

pytestmark = pytest.mark.slow


def test_heartbeats_are_sent_to_routers_after_their_hello(start):
    world = start(max_requests=9)
    world.router.wait(2 * HEARTBEAT_SECONDS)
    assert world.router.receive() == []
    world.hello()
    (first,) = world.heartbeats(bool)[:1]
    assert first.engine == "engine-0"
    assert first.epoch == world.worker.epoch
    assert first.address == world.worker.address
    assert first.fingerprint == FINGERPRINT
    assert first.max_sequence_tokens == 64
    assert not first.draining
    assert first.stats == StepStats(max_requests=9, max_kv_blocks=16, free_kv_blocks=16, tokens_per_kv_block=4)
    world.submit(1, [1, 2, 3])
    world.read(world.ends)
    last = world.heartbeats(lambda heartbeat: heartbeat.stats.iteration == 5)[-1].stats
    assert (last.active_requests, last.free_kv_blocks) == (0, 16)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [("bfloat16", {}), ("none", {"weights": "random"}), ("none", {"max_attention_window": (5,)})],
)
def test_engines_that_compute_differently_have_different_fingerprints(start, runner, dtype, settings):
    runner.dtype = dtype
    assert start(**settings).worker._heartbeat().fingerprint != FINGERPRINT


def test_heartbeats_contain_the_cache_changes_after_the_last_one_that_the_router_knows(start):
    world = start()
    prompt = list(range(1, 10))
    blocks = [short_hash(block) for block in block_chain(root_hash(FINGERPRINT), prompt, 4)]
    world.hello()
    world.submit(1, prompt, max_tokens=1)
    world.read(world.ends)
    heartbeats = world.heartbeats(lambda heartbeat: heartbeat.cache is not None and len(heartbeat.cache.stored) == 2)
    changes = heartbeats[-1].cache
    assert (set(changes.stored), changes.removed, changes.last) == (set(blocks), [], 2)
    world.hello(cache_known=1)
    changes = world.heartbeats(lambda heartbeat: heartbeat.cache is not None and heartbeat.cache.after == 1)[-1].cache
    assert (changes.stored, changes.removed, changes.last, changes.whole) == (blocks[1:], [], 2, False)
    world.hello(cache_known=2)
    world.heartbeats(lambda heartbeat: heartbeat.cache is None)
    assert world.lane.send(Flush(world.worker.epoch, 7))
    changes = world.heartbeats(lambda heartbeat: heartbeat.cache is not None)[-1].cache
    assert (changes.stored, changes.last) == ([], 3)
    assert changes.whole


def test_heartbeats_are_sent_during_a_long_step(start, runner):
    world = start()
    world.hello()
    entered, may_continue = stall(runner)
    world.submit(1, [1])
    assert entered.wait(LIMIT)
    for _ in range(2):
        world.heartbeats(bool)
    may_continue.set()
    world.read(world.ends)


def test_progress_counts_turns_of_the_loop_and_does_not_change_during_a_step(start, runner):
    world = start()
    world.hello()
    first = world.heartbeats(bool)[0].progress
    world.heartbeats(lambda heartbeat: heartbeat.progress > first)
    entered, may_continue = stall(runner)
    world.submit(1, [1])
    assert entered.wait(LIMIT)
    for _ in range(2):
        # Two heartbeats from before the step may arrive first: one already received, one in flight.
        world.heartbeats(bool)
    stuck = [world.heartbeats(bool)[-1].progress for _ in range(2)]
    assert stuck[0] == stuck[1]
    may_continue.set()
    world.heartbeats(lambda heartbeat: heartbeat.progress > stuck[1])


def test_heartbeats_contain_every_step_once_and_the_ends_of_requests(start):
    world = start()
    world.hello()
    world.heartbeats(lambda heartbeat: True)
    world.submit(1, [1, 2, 3], max_tokens=6)
    received = world.heartbeats(lambda heartbeat: any(request.stage is Stage.ENDED for request in heartbeat.requests))
    received += world.heartbeats(lambda heartbeat: heartbeat.stats.iteration == 6)
    assert [step.iteration for heartbeat in received for step in heartbeat.steps] == list(range(1, 7))
    (ended,) = (request for heartbeat in received for request in heartbeat.requests if request.stage is Stage.ENDED)
    assert (ended.request, ended.name, ended.prompt_tokens, ended.generated_tokens) == (1, "1", 3, 6)


def test_heartbeats_contain_the_model_version(start):
    assert start(model_version="v2").worker._heartbeat().model_version == "v2"


def test_heartbeats_contain_the_phase_and_the_group(start):
    worker = start(phase="decode").worker
    assert (worker._heartbeat().phase, worker._heartbeat().kv_group) == ("decode", "")
    grouped = replace(worker._identity, kv_group="g").heartbeat(StepStats(), False)
    assert (grouped.phase, grouped.kv_group) == ("decode", "g")
    (described,) = worker._identity.report(StepStats(), False).engines
    assert described.phase == "decode"


def test_a_limit_below_the_models_context(start):
    assert start(max_context_tokens=60).worker._heartbeat().max_sequence_tokens == 60


@pytest.mark.parametrize(
    ("held", "settings", "setting"),
    [
        (100, {"kv_cache_tokens": 100}, None),
        (60, {"max_context_tokens": 60, "kv_cache_tokens": 100}, None),
        (64, {"kv_cache_tokens": 64}, "kv_cache_tokens"),
        (64, {}, "kv_memory"),
    ],
)
def test_a_cache_that_holds_less_than_the_models_context(held, settings, setting):
    limits = EngineLimits(FINGERPRINT, 10, held, 9)
    reason = why_context_is_limited(EngineSettings(model="nowhere", **settings), CHECKPOINT, limits)
    if setting is None:
        assert reason is None
    else:
        assert "holds 64 tokens, fewer than the context of 100" in reason
        assert f"raise {setting}" in reason
