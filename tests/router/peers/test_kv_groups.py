"""Placement in groups of engines that copy each other's blocks."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.peers import kv_groups
from router.peers.kv_groups import COPIED_PER_COMPUTED, Computed, KvSite
from router.peers.placement import Placement
from sluice.wire.hashing import Domain
from tests.router.peers.test_placement import DETOKENIZERS, engine, report

PROMPT = range(1000, 1320)
"""20 blocks."""


def member(epoch, group="g"):
    return msgspec.structs.replace(engine(epoch), kv_group=group)


def choose(placement, engines, prompt=PROMPT, **fields):
    return placement.choose(engines, DETOKENIZERS, prompt, Domain(), 1, **fields)


def test_copied_blocks_cost_less_than_computed_ones_and_more_than_cached_ones():
    placement = Placement(1000)
    owner, twin, stranger = member(1), member(2), member(3, "other")
    for heartbeat in (twin, stranger):
        placement.on_engine_heartbeat(heartbeat)
    report(placement, owner, PROMPT[:160])
    assert choose(placement, [owner, twin, stranger]).engine == 1
    choice = choose(placement, [twin, stranger])
    assert (choice.engine, choice.uncached_tokens) == (2, 160 + 160 // COPIED_PER_COMPUTED)
    assert choose(placement, [stranger]).uncached_tokens == 320


def test_a_group_has_what_its_members_have_together():
    placement = Placement(1000)
    placement.on_engine_heartbeat(member(3))
    report(placement, member(1), PROMPT[:160])
    report(placement, member(2), PROMPT)
    # The first blocks are reported by another engine than the later ones.
    placement._engines[2].cache._reported = dict.fromkeys(list(placement._engines[2].cache._reported)[8:])
    assert choose(placement, [member(3)]).uncached_tokens == 320 // COPIED_PER_COMPUTED


@pytest.mark.parametrize("group", ["", "other"])
def test_other_engines_cannot_copy(group):
    placement = Placement(1000)
    report(placement, member(1), PROMPT)
    assert choose(placement, [member(2, group)]).uncached_tokens == 320


def test_blocks_that_an_engine_is_still_computing_cannot_be_copied():
    placement = Placement(1000)
    placement.on_engine_heartbeat(member(1))
    first = choose(placement, [member(1)])
    placement.charge(first)
    assert choose(placement, [member(2)]).uncached_tokens == 320


def test_the_blocks_of_a_lost_engine_can_be_copied_for_a_minute():
    now = 0.0
    placement = Placement(1000, lambda: now)
    report(placement, member(1), PROMPT)
    placement.forget(1)
    assert choose(placement, [member(2)]).uncached_tokens == 320 // COPIED_PER_COMPUTED
    assert choose(placement, [member(2, "")]).uncached_tokens == 320
    now = kv_groups.LOST_SECONDS - 1
    assert choose(placement, [member(2)]).uncached_tokens == 320 // COPIED_PER_COMPUTED
    now = kv_groups.LOST_SECONDS
    assert choose(placement, [member(2)]).uncached_tokens == 320
    assert not placement._lost._lost


def test_an_engine_that_returns_speaks_for_itself():
    placement = Placement(1000)
    report(placement, member(1), PROMPT)
    placement.forget(1)
    report(placement, member(1), [])
    assert choose(placement, [member(2)]).uncached_tokens == 320


def test_a_flush_forgets_lost_caches():
    placement = Placement(1000)
    report(placement, member(1), PROMPT)
    placement.forget(1)
    placement.forget_lost_caches()
    assert choose(placement, [member(2)]).uncached_tokens == 320


def test_few_lost_caches_are_kept_and_none_without_a_group():
    placement = Placement(1000)
    for epoch in range(1, kv_groups.MAX_LOST + 3):
        report(placement, member(epoch, f"g{epoch}"), PROMPT)
        placement.forget(epoch)
    report(placement, member(99, ""), PROMPT)
    placement.forget(99)
    assert list(placement._lost._lost) == list(range(3, kv_groups.MAX_LOST + 3))


def test_after_a_loss_the_twin_continues_even_if_nothing_was_reported():
    """The blocks of a request that has tokens are in the file of the lost engine, reported or not."""
    placement = Placement(1000)
    engines = [member(epoch, "g" if epoch == 7 else f"g{epoch}") for epoch in range(1, 9)]
    computed = Computed(KvSite("g"), 500)
    for _ in range(20):
        choice = choose(placement, engines, computed=computed)
        assert (choice.engine, choice.uncached_tokens) == (7, 320 // COPIED_PER_COMPUTED + 500 // COPIED_PER_COMPUTED)
    strangers = [heartbeat for heartbeat in engines if heartbeat.epoch != 7]
    assert choose(placement, strangers, computed=computed).uncached_tokens == 820


def test_an_engine_without_a_group_may_have_blocks_of_its_own_after_a_loss():
    placement = Placement(1000)
    idle, busy = member(1, ""), member(2, "")
    report(placement, busy, PROMPT[:48])
    placement.charge(choose(placement, [busy], prompt=[]))
    choice = choose(placement, [idle, busy], computed=Computed(KvSite("g"), 100))
    assert (choice.engine, choice.uncached_tokens) == (2, 320 - 48 + 100)


def test_a_group_does_not_overload_its_members():
    placement = Placement(1000)
    report(placement, member(1), PROMPT)
    for i in range(12):
        placement.charge(choose(placement, [member(2)], prompt=[i]))
    assert choose(placement, [member(2), member(3, "")]).engine == 3


@given(
    st.lists(st.tuples(st.integers(0, 24), st.integers(0, 3), st.sampled_from(["", "g", "h"])), min_size=1, max_size=5),
    st.sampled_from(["", "g"]),
    st.integers(0, 100),
)
def test_no_other_engine_would_continue_sooner(engines, group, later):
    """For any numbers of cached blocks and of requests, in any groups: no shortcut of the search changes its result."""
    placement, prompt = Placement(1000), range(5000, 5330)
    heartbeats = [member(epoch, kv_group) for epoch, (_, _, kv_group) in enumerate(engines, 1)]
    for heartbeat, (blocks, requests, _) in zip(heartbeats, engines, strict=True):
        report(placement, heartbeat, prompt[: 16 * blocks])
        for _ in range(requests):
            placement.charge(choose(placement, [heartbeat], prompt=[]))
    costs = {}
    for heartbeat, (blocks, requests, kv_group) in zip(heartbeats, engines, strict=True):
        own = 16 * min(blocks, 20)
        shared = 16 * min(20, max(b for b, _, g in engines if g == kv_group)) if kv_group else own
        has_all = bool(group) and kv_group == group
        shared = 320 if has_all else shared
        copied = shared - own
        rest = 330 - shared + (-(-later // COPIED_PER_COMPUTED) if has_all else later if group else 0)
        costs[heartbeat.epoch] = requests * 32, rest + -(-copied // COPIED_PER_COMPUTED)
    choice = choose(placement, heartbeats, prompt=prompt, computed=Computed(KvSite(group), later))
    assert sum(costs[choice.engine]) == min(map(sum, costs.values()))
    assert choice.uncached_tokens == costs[choice.engine][1]
