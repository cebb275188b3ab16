"""Blocks that are offloaded to host memory and loaded again."""

import pytest

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import State
from engine_worker.step import Move, MoveKind
from sluice.wire.params import RangeRetention, RetentionParams
from tests.engine_worker.kvcache.sequences import computed, one
from tests.fakes.engine import EngineBench

EAGERLY = RetentionParams((RangeRetention(0, 1000, 100),))


def revisit(num_host_blocks: int, rounds: int = 4) -> tuple[int, list[list[int]]]:
    """Run six prompts of 8 blocks several times in a pool of 16 blocks; returns the prompt tokens computed from the
    second round on, and the outputs."""
    bench = EngineBench(num_blocks=16, num_host_blocks=num_host_blocks, max_batch_size=1)
    prompts, recomputed = [range(100 * i, 100 * i + 32) for i in range(6)], 0
    requests = []
    for round_ in range(rounds):
        before = bench.runner.computed
        for prompt in prompts:
            requests.append(bench.submit([token % 97 for token in prompt], max_tokens=4))
            bench.run()
        recomputed += bench.runner.computed - before if round_ else 0
    assert all(bench.output(request) == bench.expected(request) for request in requests)
    return recomputed - (rounds - 1) * len(prompts) * 3, [bench.output(request) for request in requests]


def test_the_host_tier_avoids_recomputing_a_large_working_set():
    without, outputs = revisit(0)
    tier, same = revisit(48)
    assert without == 3 * 6 * 32
    assert tier <= 0.2 * without
    assert outputs == same


def test_an_evicted_block_is_offloaded_and_loaded_again():
    cache = KvCacheManager(num_blocks=4, tokens_per_block=4, num_host_blocks=4)
    cache.release(computed(cache, range(8)))
    other = one(range(50, 64))
    assert cache.allocate([other]) == [other]
    cache.check()
    evicted = {(move.kind, move.source) for move in cache.tiers.take_moves()}
    assert evicted == {(MoveKind.OFFLOAD, block) for block in other.blocks[-2:]}
    cache.release(other)
    repeated = one(range(9))
    assert cache.allocate([repeated]) == [repeated]
    assert repeated.num_computed == 8
    assert [(move.kind, move.target) for move in cache.tiers.take_moves()] == [
        (MoveKind.ONLOAD, block) for block in repeated.blocks[:2]
    ]
    assert repeated.request.blocks_reused == 2
    cache.check()


def test_a_block_is_loaded_once_for_two_sequences():
    cache = KvCacheManager(num_blocks=8, tokens_per_block=4, num_host_blocks=8)
    cache.release(computed(cache, range(8)))
    cache.release(computed(cache, range(50, 82)))
    cache.tiers.take_moves()
    pair = [one(range(9)), one(range(10))]
    forecast = cache.forecast()
    assert all(forecast.admit(sequence, headroom=0) for sequence in pair)
    assert cache.allocate(pair) == pair
    assert forecast.available == cache.pool.available
    assert pair[0].blocks[:2] == pair[1].blocks[:2]
    assert [move.kind for move in cache.tiers.take_moves()].count(MoveKind.ONLOAD) == 2
    cache.check()


def test_a_prefix_that_does_not_fit_stays_on_the_host():
    cache = KvCacheManager(num_blocks=4, tokens_per_block=4, num_host_blocks=4)
    cache.release(computed(cache, range(8)))
    holder = computed(cache, range(50, 62))
    waiting = one(range(9))
    assert not cache.forecast().admit(waiting, headroom=0)
    assert cache.allocate([waiting]) == []
    cache.check()
    cache.release(holder)
    assert cache.allocate([waiting]) == [waiting]
    assert waiting.num_computed == 8


def test_a_full_host_evicts_the_lowest_priority_first():
    cache = KvCacheManager(num_blocks=4, tokens_per_block=4, num_host_blocks=2)
    for prompt, retention in [(range(8), EAGERLY), (range(20, 36), RetentionParams()), (range(40, 56), EAGERLY)]:
        cache.release(computed(cache, prompt, retention))
        cache.check()
    repeated = one(range(9))
    assert cache.allocate([repeated]) == [repeated]
    assert repeated.num_computed == 8


def test_recomputed_content_is_removed_from_the_host():
    """The last block of a prompt is never reused, because its last token has to be computed."""
    bench = EngineBench(num_blocks=4, num_host_blocks=4)
    for prompt in (range(8), range(50, 62), range(8)):
        bench.submit(prompt, max_tokens=1)
        bench.run()
    tiers = bench.cache.tiers
    hashes = [content.hash for pool in (tiers.device, tiers.host) for _, content in pool.contents()]
    assert len(hashes) == len(set(hashes))


def test_a_flush_empties_the_host():
    cache = KvCacheManager(num_blocks=2, tokens_per_block=4, num_host_blocks=4)
    cache.release(computed(cache, range(8)))
    cache.release(computed(cache, range(20, 28)))
    assert cache.tiers.flush() == 4
    cache.check()
    assert cache.tiers.host.num_free == 4
    assert cache.tiers.journal.since(0).stored == []


@pytest.mark.parametrize("when", ["before", None, "after"])
def test_content_that_a_failed_step_should_have_moved_is_dropped(when):
    """With a budget of four tokens the second newcomer is not in the step that loads its blocks."""
    bench = EngineBench(num_blocks=14, num_host_blocks=20, max_tokens_per_step=4, max_batch_size=2)
    for prompt in (range(12), range(20, 32), *(range(i, i + 12) for i in range(40, 80, 8))):
        bench.submit(prompt, max_tokens=1)
        bench.run()
    first, second = bench.submit([*range(12), 90, 91, 92, 93]), bench.submit([*range(20, 32), 90])
    bench.runner.fail, bench.runner.fail_moving = when, when is None
    bench.step()
    moves = bench.runner.steps[-1].moves
    assert [move.kind for move in moves].count(MoveKind.ONLOAD) == 6
    sequence = bench.engine.live.requests[second].sequences[0]
    assert sequence.state is State.WAITING
    assert sequence.blocks == []
    bench.run()
    assert bench.fault(first) == "STEP_FAILED"
    assert bench.output(second) == bench.expected(second)


def test_undone_moves_are_reported_to_the_journal():
    cache = KvCacheManager(num_blocks=4, tokens_per_block=4, num_host_blocks=4)
    cache.release(computed(cache, range(8)))
    evicting = one(range(50, 64))
    cache.allocate([evicting])
    version = cache.tiers.journal.since(0).last
    assert cache.undo(cache.tiers.take_moves()) == []
    cache.check()
    assert len(cache.tiers.journal.since(version).removed) == 2
    repeated = one(range(9))
    cache.release(evicting)
    cache.allocate([repeated])
    assert repeated.num_computed == 0


def test_undo_returns_the_holders_that_rely_on_a_move():
    cache = KvCacheManager(num_blocks=8, tokens_per_block=4, num_host_blocks=8)
    cache.release(computed(cache, range(8)))
    cache.release(computed(cache, range(50, 82)))
    cache.tiers.take_moves()
    loading, other = one(range(9)), one(range(60, 63))
    cache.allocate([loading, other])
    moves = cache.tiers.take_moves()
    assert cache.undo(moves) == [loading]
    cache.release(loading)
    cache.check()
    assert cache.undo([Move(MoveKind.COPY, 0, 1)]) == []
