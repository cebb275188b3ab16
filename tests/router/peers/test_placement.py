import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.peers.placement import SEQUENCE_WORK, SPREAD_SLACK, Placement
from sluice.wire.hashing import Domain, block_chain, root_hash, short_hash
from sluice.wire.heartbeats import CacheChanges, DetokenizerHeartbeat, EngineHeartbeat
from sluice.wire.stats import StepStats
from sluice.wire.timing import CACHE_REPORT_SECONDS


def engine(epoch, fingerprint="f", block=16, active=0):
    stats = StepStats(tokens_per_kv_block=block, active_requests=active)
    return EngineHeartbeat(f"e{epoch}", epoch, f"ipc://e{epoch}", fingerprint, 2048, False, stats)


def detokenizer(epoch, streams=0):
    return DetokenizerHeartbeat(f"d{epoch}", epoch, f"ipc://d{epoch}", False, streams, 0, 0.0)


ENGINES = [engine(1), engine(2)]
DETOKENIZERS = [detokenizer(11), detokenizer(12), detokenizer(13)]


def place(placement, prompt, engines=ENGINES, salt="", n=1):
    choice = placement.choose(engines, DETOKENIZERS, prompt, Domain(salt), n)
    placement.charge(choice)
    return choice


def report(placement, heartbeat, prompt):
    """Report that this engine has the prompt cached."""
    stored = [short_hash(block) for block in block_chain(root_hash("f"), prompt, 16)]
    changes = CacheChanges(0, len(stored), stored, whole=True)
    placement.on_engine_heartbeat(msgspec.structs.replace(heartbeat, cache=changes))
    while placement.update_cache():
        pass


def run(placement, prompt, **fields):
    """Place a request and end it immediately."""
    choice = place(placement, prompt, **fields)
    placement.on_first_token(choice)
    placement.release(choice, begun=True)
    return choice


def test_the_least_work_before_the_first_token():
    placement = Placement(1000)
    first = place(placement, range(100))
    assert first.uncached_tokens == 100
    second = place(placement, range(1000, 1050))
    assert second.engine != first.engine
    assert place(placement, range(2000, 2010)).engine == second.engine


def test_the_longest_cached_prefix_wins():
    placement = Placement(1000)
    long = run(placement, range(200))
    unrelated = run(placement, range(5000, 5200))
    if unrelated.engine == long.engine:
        place(placement, range(9000, 9001))
    extended = run(placement, [*range(160), *range(7000, 7040)])
    assert extended.engine == long.engine
    assert extended.uncached_tokens == 40


def test_a_shared_prefix_does_not_overload_one_engine():
    placement = Placement(100_000)
    engines = [run(placement, range(1900)).engine]
    engines += [place(placement, [*range(1900), i]).engine for i in range(64)]
    counts = [engines.count(epoch) for epoch in (1, 2)]
    assert min(counts) >= 64 // 2 - SPREAD_SLACK - 2


def test_equal_requests_spread_over_engines_and_detokenizers():
    placement = Placement(1000)
    choices = [place(placement, [i]) for i in range(60)]
    assert {sum(choice.engine == epoch for choice in choices) for epoch in (1, 2)} == {30}
    assert {sum(choice.detokenizer == epoch for choice in choices) for epoch in (11, 12, 13)} == {20}


def test_sequences_count_as_work():
    placement = Placement(1000)
    wide = place(placement, [1], n=64)
    narrow = [place(placement, [i]) for i in range(32)]
    assert {choice.engine for choice in narrow} == {1, 2} - {wide.engine}
    assert wide.detokenizer not in {choice.detokenizer for choice in narrow}


def test_prompts_with_another_salt_or_model_share_no_prefix():
    placement = Placement(1000)
    first = run(placement, range(200), salt="a")
    assert first.uncached_tokens == 200
    assert run(placement, range(200), salt="a").uncached_tokens == 8
    assert run(placement, range(200), salt="b", engines=[ENGINES[first.engine - 1]]).uncached_tokens == 200
    renamed = [engine(first.engine, fingerprint="other")]
    assert run(placement, range(200), salt="a", engines=renamed).uncached_tokens == 200


def test_a_new_epoch_has_nothing_cached():
    placement = Placement(1000)
    first = run(placement, range(200))
    placement.forget(first.engine)
    assert run(placement, range(200), engines=[ENGINES[first.engine - 1]]).uncached_tokens == 200


def test_reported_blocks_count_as_cached():
    placement = Placement(1000)
    report(placement, ENGINES[1], range(160))
    assert placement.cache_version(2) == 10
    choices = [run(placement, [*range(160), i]) for i in range(8)]
    assert {(choice.engine, choice.uncached_tokens) for choice in choices} == {(2, 1)}


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 4)), min_size=1, max_size=5), st.integers(0, 170))
def test_no_other_engine_would_finish_the_prompt_sooner(engines, tokens):
    """For any numbers of cached blocks and of requests on the engines."""
    placement = Placement(1000)
    heartbeats = [engine(epoch) for epoch in range(1, len(engines) + 1)]
    work = []
    for heartbeat, (blocks, requests) in zip(heartbeats, engines, strict=True):
        report(placement, heartbeat, range(16 * blocks))
        for _ in range(requests):
            place(placement, [], engines=[heartbeat])
        work.append(requests * SEQUENCE_WORK + tokens - 16 * min(blocks, tokens // 16))
    choice = placement.choose(heartbeats, DETOKENIZERS, range(tokens), Domain(), 1)
    assert work[choice.engine - 1] == min(work)
    assert choice.uncached_tokens == tokens - 16 * min(engines[choice.engine - 1][0], tokens // 16)


def test_an_engine_that_is_clearly_more_loaded_gets_no_request_even_with_a_cached_prefix():
    placement = Placement(1000)
    report(placement, ENGINES[1], range(160))
    for i in range(SPREAD_SLACK + 1):
        place(placement, [i], engines=[ENGINES[1]])
    assert place(placement, range(160)).engine == 1


def test_a_placed_prompt_is_expected_until_a_report_had_time_to_arrive():
    now = 0.0
    placement = Placement(1000, lambda: now)
    waiting = place(placement, range(160))
    now = 1e6
    assert run(placement, range(160), engines=[ENGINES[waiting.engine - 1]]).uncached_tokens == 0
    placement.on_first_token(waiting)
    placement.release(waiting, begun=True)
    now += CACHE_REPORT_SECONDS
    assert run(placement, range(160), engines=[ENGINES[waiting.engine - 1]]).uncached_tokens == 160


def test_a_request_that_never_began_leaves_no_expectation():
    placement = Placement(1000)
    first = place(placement, range(160))
    placement.release(first, begun=False)
    assert run(placement, range(160), engines=[ENGINES[first.engine - 1]]).uncached_tokens == 160


def test_engines_without_blocks_are_chosen_by_load():
    placement = Placement(10)
    assert place(placement, range(100), engines=[engine(1, block=0)]).uncached_tokens == 100


def test_the_load_of_other_routers_counts():
    placement = Placement(1000)
    placement.on_engine_heartbeat(engine(1, active=5))
    placement.on_detokenizer_heartbeat(detokenizer(11, streams=5))
    choices = [place(placement, [i]) for i in range(4)]
    assert {choice.engine for choice in choices} == {2}
    assert 11 not in {choice.detokenizer for choice in choices}
    placement.on_engine_heartbeat(engine(2, active=4))
    assert placement._engines[2].others == 0


def test_all_counts_return_to_zero_even_after_a_loss():
    placement = Placement(1000)
    choices = [place(placement, range(i * 100, i * 100 + 50), n=2) for i in range(6)]
    placement.forget(1)
    placement.forget(11)
    for i, choice in enumerate(choices):
        if i % 2:
            placement.on_first_token(choice)
        placement.release(choice, begun=bool(i % 2))
    load = placement._engines[2]
    assert (load.requests, load.sequences, load.context_tokens, load.work) == (0, 0, 0, 0)
    assert set(placement._streams.values()) == {0}
