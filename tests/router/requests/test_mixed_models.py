"""Engines with different models in one ring: no stream ever gets tokens of two models."""

import asyncio

import pytest
from grpc import StatusCode

from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import ResumeFrom
from sluice.v1.sampling_pb2 import SamplingParams
from sluice.wire.hashing import block_chain, root_hash, short_hash
from tests.fakes.ring_scripts import generate
from tests.router.conftest import nothing_left, refused, rest, text_spec
from tests.router.requests.broken_attempts import IDS, Script, begun, check_whole, midway, silent
from tests.router.test_metrics import scrape

pytestmark = pytest.mark.usefixtures("quick_recovery")

OLD, NEW = "0123456789abcdef", "fedcba9876543210"
SEED = SamplingParams(seed=5)


@pytest.fixture
def mixed(ring, start):
    """Starts a router with one engine for each of these fingerprints."""

    async def mixed(*models: str, **settings):
        for number, model in enumerate(models):
            engine = ring.add_engine(f"engine-{number}")
            engine.fingerprint = model
        ring.add_detokenizer()
        return await start(**{"peer_timeout": 0.6, **settings})

    return mixed


def engines_of(ring, model):
    return [engine for engine in ring.engines.values() if engine.fingerprint == model]


def die(engine):
    engine.beating = False


def come_back(engine, model):
    """Like a new process that was started with this model."""
    engine.fingerprint, engine.beating, engine.draining = model, True, False
    engine.epoch += 1


async def broken(client, ring, first=midway, **fields):
    """A stream whose first attempt stops. Returns its task and that attempt."""
    ring.script = script = Script(first)
    task = asyncio.ensure_future(client.events(text_spec(output=IDS, **fields)))
    await asyncio.wait_for(script.reached.wait(), 60)
    return task, script


async def test_new_requests_go_to_the_model_that_most_engines_serve(mixed, ring):
    client = await mixed(OLD, NEW, NEW)
    # Concurrently: engines with equal load are chosen at random, so successive requests might all get the same one.
    for events in await asyncio.gather(*(client.events(text_spec(f"x = {number}")) for number in range(32))):
        assert events[0].started.model_fingerprint == NEW
    assert {call.engine.fingerprint for call in ring.calls} == {NEW}
    assert len({call.engine for call in ring.calls}) == 2


async def test_a_cached_prefix_of_the_other_model_attracts_no_requests(mixed, ring):
    client = await mixed(OLD, NEW, NEW)
    prompt = list(range(64))
    (old,) = engines_of(ring, OLD)
    old.journal.store(*map(short_hash, block_chain(root_hash(OLD), prompt, 16)))
    placement = client.router.ring.placement
    await client.until(lambda: placement.cache_version(old.epoch) == 4)
    await client.generate(pb.GenerationSpec(token_ids=pb.TokenIds(ids=prompt)))
    assert ring.calls[0].engine.fingerprint == NEW


async def test_a_stream_continues_only_at_an_engine_with_its_model(mixed, ring):
    client = await mixed(OLD, OLD, NEW, NEW, NEW)
    for engine in engines_of(ring, NEW):
        engine.draining = True
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 2)
    task, script = await broken(client, ring)
    for engine in engines_of(ring, NEW):
        engine.draining = False
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 5)
    die(script.attempts[0].engine)
    check_whole(await asyncio.wait_for(task, 60), script.attempts[0].submit, 1)
    assert [call.engine.fingerprint for call in script.attempts] == [OLD, OLD]


async def test_a_stream_waits_for_an_engine_that_may_return_with_its_model(mixed, ring):
    client = await mixed(OLD, NEW)
    task, script = await broken(client, ring)
    (old,), (new,) = engines_of(ring, OLD), engines_of(ring, NEW)
    die(old)
    await client.until(lambda: client.router.ring.dispatcher.between_attempts)
    ring.script = generate
    # In the meantime the other model serves new requests.
    assert (await client.events(text_spec("y")))[0].started.model_fingerprint == NEW
    assert [call.engine for call in ring.calls] == [old, new]
    assert not task.done()
    come_back(old, OLD)
    check_whole(await asyncio.wait_for(task, 60), script.attempts[0].submit, 1)
    assert (len(old.calls), len(new.calls)) == (2, 1)


@pytest.mark.parametrize("first", [midway, begun])
async def test_a_stream_fails_if_every_engine_serves_another_model(mixed, ring, first):
    """Even a stream that has only received Started, which names the model."""
    client = await mixed(OLD, NEW)
    task, script = await broken(client, ring, first)
    (old,) = engines_of(ring, OLD)
    await client.until(lambda: next(iter(client.router.ring.requests.open)).log.start_delivered)
    come_back(old, NEW)
    details = await asyncio.wait_for(refused(task), 60)
    assert details.code is StatusCode.FAILED_PRECONDITION
    assert (details.info.reason, details.retry) == ("MODEL_CHANGED", None)
    assert OLD[:8] in details.error.details()
    assert NEW[:8] in details.error.details()
    assert dict(details.info.metadata).items() >= {"model_fingerprint": OLD, "served": NEW}.items()
    assert len(script.attempts) == 1
    await client.until(lambda: nothing_left(client))
    assert client.lines()[0]["outcome"] == "MODEL_CHANGED"


async def test_a_unary_response_is_from_one_model_too(mixed, ring):
    client = await mixed(OLD, NEW)
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.generate(text_spec()))
    await asyncio.wait_for(script.reached.wait(), 60)
    await client.until(lambda: next(iter(client.router.ring.requests.open)).log.received)
    come_back(script.attempts[0].engine, NEW)
    assert (await asyncio.wait_for(refused(task), 60)).info.reason == "MODEL_CHANGED"


async def test_a_request_of_which_nothing_was_delivered_may_change_its_model(mixed, ring):
    client = await mixed(OLD, NEW)
    task, script = await broken(client, ring, silent)
    die(script.attempts[0].engine)
    events = await asyncio.wait_for(task, 60)
    check_whole(events, script.attempts[0].submit, 1)
    assert [call.engine.fingerprint for call in script.attempts] == [OLD, NEW]
    assert events[0].started.model_fingerprint == NEW


async def test_a_stream_that_finds_no_engine_in_time_fails_like_any_other(mixed, ring):
    client = await mixed(OLD, NEW, recovery_timeout=0.5)
    task, script = await broken(client, ring)
    die(script.attempts[0].engine)
    details = await asyncio.wait_for(refused(task), 60)
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "ENGINE_LOST")


async def test_if_models_may_be_mixed_any_engine_serves_any_request(mixed, ring):
    client = await mixed(OLD, NEW, allow_mixed_models=True)
    task, script = await broken(client, ring)
    first = script.attempts[0]
    die(first.engine)
    check_whole(await asyncio.wait_for(task, 60), first.submit, 1)
    assert len({call.engine for call in script.attempts}) == 2
    first.engine.beating = True
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 2)
    ring.script = generate
    await asyncio.gather(*(client.events(text_spec(f"x = {i}")) for i in range(16)))
    assert {call.engine.fingerprint for call in ring.calls} == {OLD, NEW}


async def test_a_stream_leaves_a_draining_engine_only_for_one_with_its_model(mixed, ring):
    client = await mixed(OLD, NEW)
    task, script = await broken(client, ring)
    (old,), ring.script = engines_of(ring, OLD), generate
    old.draining = True
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 1)
    assert (await client.events(text_spec("y")))[0].started.model_fingerprint == NEW
    assert not client.lines("attempt_given_up")
    # A rolling restart: the process ends, and a new one with the same model starts.
    come_back(old, OLD)
    check_whole(await asyncio.wait_for(task, 60), script.attempts[0].submit, 1)
    assert [call.engine.fingerprint for call in ring.calls] == [OLD, OLD, NEW]


async def receive_part(client, count=5):
    """The first `count` token ids of a stream, the remaining ids, and the model's fingerprint."""
    call = client.stream(text_spec(sampling=SEED, output=IDS))
    events = [await call.read(), *await rest(call)]
    ids = [token for event in events for token in event.delta.token_ids]
    return ids[:count], ids[count:], events[0].started.model_fingerprint


async def resumed(client, ids, model):
    return await client.events(
        text_spec(sampling=SEED, output=IDS, resume=[ResumeFrom(token_ids=ids, model_fingerprint=model)])
    )


async def test_a_resume_names_its_model(mixed, ring):
    client = await mixed(OLD, NEW, NEW)
    ids, remaining_ids, _ = await receive_part(client)
    events = await resumed(client, ids, OLD)
    assert [token for event in events for token in event.delta.token_ids] == remaining_ids
    assert events[0].started.model_fingerprint == OLD
    assert len(engines_of(ring, OLD)[0].calls) == 1
    assert (await resumed(client, ids, ""))[0].started.model_fingerprint == NEW


async def test_a_resume_with_a_model_that_is_not_served_fails_immediately(mixed, ring):
    client = await mixed(NEW, NEW)
    details = await refused(resumed(client, [1, 2], OLD))
    assert (details.code, details.info.reason) == (StatusCode.FAILED_PRECONDITION, "MODEL_CHANGED")
    assert not ring.calls
    await client.until(lambda: nothing_left(client))


async def test_a_resume_with_a_model_that_may_return_is_retried(mixed, ring):
    """The client retries it, because a router keeps a request that has not begun only for peer_wait."""
    client = await mixed(OLD, NEW, peer_wait=0.3)
    (old,) = engines_of(ring, OLD)
    die(old)
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 1)
    details = await refused(resumed(client, [1, 2], OLD))
    assert (details.code, details.info.reason) == (StatusCode.UNAVAILABLE, "NO_ENGINE")
    assert OLD in details.error.details()
    assert details.retry is not None
    come_back(old, OLD)
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 2)
    assert (await resumed(client, [1, 2], OLD))[0].started.model_fingerprint == OLD


BAD = {
    "no fingerprint": [ResumeFrom(index=0, token_ids=[1], model_fingerprint="not/one")],
    "two models": [
        ResumeFrom(index=0, token_ids=[1], model_fingerprint=OLD),
        ResumeFrom(index=1, token_ids=[1], model_fingerprint=NEW),
    ],
    "one of two": [ResumeFrom(index=0, token_ids=[1], model_fingerprint=OLD), ResumeFrom(index=1, token_ids=[1])],
}


@pytest.mark.parametrize("case", BAD)
async def test_a_resume_with_an_invalid_model_is_refused(mixed, ring, case):
    client = await mixed(OLD)
    resume = BAD[case]
    details = await refused(client.events(text_spec(n=2, sampling=SEED, resume=resume)))
    assert details.code is StatusCode.INVALID_ARGUMENT
    assert details.fields == [f"spec.resume[{len(resume) - 1}].model_fingerprint"]


async def test_a_longer_context_of_the_other_model_does_not_count(mixed, ring):
    client = await mixed(OLD, OLD, NEW)
    for engine in engines_of(ring, OLD):
        engine.max_sequence_tokens = 100
    members = client.router.ring.membership.engines
    await client.until(
        lambda: sorted(peer.heartbeat.max_sequence_tokens for peer in members.usable) == [100, 100, 2048]
    )
    long = pb.GenerationSpec(token_ids=pb.TokenIds(ids=range(200)))
    assert (await refused(client.events(long))).info.reason == "CONTEXT_OVERFLOW"


async def test_a_mixed_ring_is_reported(mixed, ring):
    client = await mixed(OLD, OLD, OLD)
    await client.until(lambda: len(client.router.ring.membership.engines.usable) == 3)
    # Wait until the other engines are known, because the log line lists the engines known at that time.
    come_back(list(ring.engines.values())[2], NEW)
    await client.until(lambda: client.lines("models_diverged"))
    await client.events(text_spec())
    (line,) = client.lines("models_diverged")
    assert line["engines"] == {OLD: ["engine-0", "engine-1"], NEW: ["engine-2"]}
    assert scrape(client.router)("models") == 2
    stats = (await client.admin.GetStats(admin_pb2.GetStatsRequest())).stats
    assert [engine.model_fingerprint for engine in stats.engines] == [OLD, OLD, NEW]
    assert stats.serving_model_fingerprint == OLD
    (new,) = engines_of(ring, NEW)
    come_back(new, OLD)
    await client.until(lambda: client.lines("models_converged"))
    assert scrape(client.router)("models") == 1
    assert len(client.lines("models_diverged")) == 1


async def test_a_rolling_restart_with_the_same_model_changes_nothing(mixed, ring):
    client = await mixed(OLD, OLD)
    for _ in range(2):
        task, script = await broken(client, ring)
        first = script.attempts[0]
        first.engine.draining = True
        check_whole(await asyncio.wait_for(task, 60), first.submit, 1)
        assert script.attempts[1].engine is not first.engine
        come_back(first.engine, OLD)
        await client.until(lambda: len(client.router.ring.membership.engines.usable) == 2)
    assert not client.lines("models_diverged")
    assert not client.lines("serving_model_changed")
