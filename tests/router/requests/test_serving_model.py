"""Which model new requests go to, as a rule; tests/router/requests/test_mixed_models.py has it over a ring."""

from dataclasses import replace

import msgspec
import pytest
import structlog

from router.errors import RequestError
from router.peers.peers import Peer
from router.requests.request_state import RequestState
from router.requests.serving_model import ServingModel, engines_by_model
from router.validate.model import describe
from sluice.ring.errors import ErrorCode
from sluice.ring.heartbeats import EngineHeartbeat
from sluice.ring.rows import Started, TextRow
from sluice.ring.stats import StepStats
from sluice.v1 import generation_pb2 as pb
from tests.router.requests.states import submit
from tests.router.validate.test_spec import spec_of


@pytest.fixture
def live(checkpoint):
    return RequestState(1, spec_of(pb.GenerationSpec(text="t"), describe(checkpoint)))


def engines(*models: str) -> list[Peer]:
    found = []
    for number, model in enumerate(models):
        peer = Peer(f"ipc://{number}", frozenset(), None)
        peer.on_heartbeat(EngineHeartbeat(f"engine-{number}", number, peer.address, model, 64, False, StepStats()), 0.0)
        found.append(peer)
    return found


def versions(*labels: str) -> list[Peer]:
    """Engines of these versions, each with the label as fingerprint of its model."""
    found = engines(*labels)
    for peer in found:
        peer.heartbeat = msgspec.structs.replace(peer.heartbeat, model_version=peer.heartbeat.fingerprint)
    return found


def serving(mixing: bool = False, version: str = "") -> tuple[ServingModel, list[dict]]:
    logs: list[dict] = []

    def keep(_, __, event):
        logs.append(event)
        raise structlog.DropEvent

    return ServingModel(mixing, structlog.wrap_logger(None, processors=[keep]), version), logs


def models(peers: list[Peer]) -> list[str]:
    return [peer.heartbeat.fingerprint for peer in peers]


def test_most_engines_decide(live):
    found, _ = serving()
    assert models(found.engines_for(live, engines("a", "b", "b"))) == ["b", "b"]
    assert models(found.engines_for(live, engines("a", "a", "a", "b", "b"))) == ["a", "a", "a"]


def test_a_fresh_router_takes_the_smallest_of_equals(live):
    assert serving()[0].choose(engines("b", "a", "c")) == "a"
    assert models(serving()[0].engines_for(live, engines("b", "a"))) == ["a"]


def test_on_a_tie_requests_go_on_where_they_went(live):
    found, logs = serving()
    found.engines_for(live, engines("b"))
    assert models(found.engines_for(live, engines("a", "b"))) == ["b"]
    # One engine of the other model comes and goes, as in a restart.
    for ring in (("a", "a", "b", "b"), ("a", "b", "b"), ("a", "a", "b", "b")):
        assert set(models(found.engines_for(live, engines(*ring)))) == {"b"}
    assert not logs
    assert set(models(found.engines_for(live, engines("a", "a", "b")))) == {"a"}
    assert [(line["model"], line["former"]) for line in logs] == [("a", "b")]


def test_a_look_settles_nothing(live):
    found, _ = serving()
    assert found.choose(engines("b")) == "b"
    assert found.choose(engines("a", "b")) == "a"
    assert found.choose([]) == ""


def test_a_bound_request_stays(live):
    submit(live, "b")
    live.log.mark_start_delivered()
    found, _ = serving()
    assert models(found.engines_for(live, engines("a", "a", "b"))) == ["b"]
    assert found.engines_for(live, engines("a", "a")) == []
    assert found.choose(engines("a", "a", "b")) == "a"


def test_where_models_are_mixed_a_bound_request_prefers_its_own(live):
    found, _ = serving(mixing=True)
    assert models(found.engines_for(live, engines("a", "b"))) == ["a", "b"]
    submit(live, "b")
    live.log.mark_start_delivered()
    assert models(found.engines_for(live, engines("a", "b"))) == ["b"]
    assert models(found.engines_for(live, engines("a", "a"))) == ["a", "a"]
    found.check(live, engines("a"))
    assert found.choose(engines("a", "b")) == ""


@pytest.mark.parametrize("mixing", [False, True])
def test_new_requests_go_to_the_version_that_the_operator_names(live, mixing):
    found, logs = serving(mixing, "v2")
    assert models(found.engines_for(live, versions("v1", "v1", "v2"))) == ["v2"]
    assert not logs


def test_it_counts_among_engines_of_one_model_too(live):
    found, _ = serving(version="v2")
    same = engines("a", "a")
    same[1].heartbeat = msgspec.structs.replace(same[1].heartbeat, model_version="v2")
    assert found.engines_for(live, same) == same[1:]


def test_a_bound_request_stays_with_its_model_whatever_version_is_named(live):
    submit(live, "v1")
    live.log.mark_start_delivered()
    found, _ = serving(version="v2")
    assert models(found.engines_for(live, versions("v1", "v2", "v2"))) == ["v1"]


def test_while_no_engine_has_the_version_most_decide_and_it_is_logged_once(live):
    found, logs = serving(version="v3")
    for _ in range(3):
        assert models(found.engines_for(live, versions("v1", "v2", "v2"))) == ["v2", "v2"]
        assert found.engines_for(live, []) == []
    assert models(found.engines_for(live, versions("v1", "v1", "v3"))) == ["v3"]
    events = [line["event"] for line in logs]
    assert events.count("serving_version_missing") == events.count("serving_version_found") == 1


def test_a_version_may_be_named_at_any_time(live):
    found, logs = serving(version="v1")
    ring = versions("v1", "v1", "v2")
    assert found.set_version("v2", ring) == "v1"
    assert models(found.engines_for(live, ring)) == ["v2"]
    assert (found.version, found.count(ring)) == ("v2", 1)
    assert found.set_version("v1", ring) == "v2"
    assert models(found.engines_for(live, ring)) == ["v1", "v1"]
    assert found.set_version("", ring) == "v1"
    assert (models(found.engines_for(live, ring)), found.count(ring)) == (["v1", "v1"], 3)
    logged = [
        (each["former"], each["version"], each["engines"]) for each in logs if each["event"] == "serving_version_set"
    ]
    assert logged == [("v1", "v2", 1), ("v2", "v1", 2), ("v1", "", 3)]


def test_the_same_version_again_changes_nothing():
    found, logs = serving()
    assert [found.set_version("v2", versions("v1", "v2")) for _ in range(3)] == ["", "v2", "v2"]
    assert len(logs) == 1


def test_a_version_that_no_engine_has_is_refused_and_nothing_changes(live):
    found, logs = serving(version="v1")
    unlabelled = engines("a")
    for given, problem in (
        (versions("v2", "v1", "v2"), "must be one of 'v1', 'v2'"),
        (unlabelled, "but no engine that accepts work has a version"),
    ):
        with pytest.raises(RequestError) as error:
            found.set_version("v3\n", given)
        assert error.value.code is ErrorCode.MODEL_NOT_FOUND
        assert error.value.message == rf"version is 'v3\n', {problem}"
    assert found.version == "v1"
    assert not logs


def test_of_many_versions_some_are_named():
    with pytest.raises(RequestError) as error:
        serving()[0].set_version("v", versions(*(f"v{number:03}" for number in range(500))))
    assert error.value.message.endswith("'v014', 'v015', …")


def test_whether_a_missing_version_was_logged_counts_for_that_version_alone(live):
    found, logs = serving(version="v1")
    for ring in (("v2",), ("v2", "v3")):
        found.engines_for(live, versions(*ring))
    found.set_version("v2", versions("v2", "v3"))
    for ring in (("v2", "v3"), ("v3",), ("v3",)):
        found.engines_for(live, versions(*ring))
    assert [(line["event"], line["version"]) for line in logs if "version" in line] == [
        ("serving_version_missing", "v1"),
        ("serving_version_set", "v2"),
        ("serving_version_missing", "v2"),
    ]


def start_delivered(live):
    live.log.mark_start_delivered()


def brought_tokens(live):
    live.on_started(Started(1, 0, 1, 0))
    live.log.append(TextRow(1, 0, 0, 0, [5], [], "x", None))


def ended_a_sequence(live):
    live.on_terminal(0)


@pytest.mark.parametrize("event", [start_delivered, brought_tokens, ended_a_sequence])
def test_what_binds(live, event):
    assert not live.bound
    submit(live, "a")
    assert not live.bound
    event(live)
    assert live.bound


def test_a_resumed_stream_is_bound_from_the_beginning(live):
    assert RequestState(1, replace(live.spec, resume_model="a")).bound


def test_it_is_logged_when_a_ring_becomes_mixed_and_when_it_no_longer_is():
    found, logs = serving()
    for ring in (("a", "a"), (), ("a", "b"), ("b", "a"), (), ("b", "b"), ("b", "b")):
        found.watch(engines(*ring))
    assert [line["event"] for line in logs] == ["models_diverged", "models_converged"]
    assert logs[0]["engines"] == {"a": ["engine-0"], "b": ["engine-1"]}
    assert logs[1]["model"] == "b"


def test_only_engines_with_heartbeats_count():
    peers = engines("a", "b")
    peers[1].alive = False
    assert engines_by_model(peers) == {"a": ["engine-0"]}
