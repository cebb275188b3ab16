"""The rule for the model of new requests. tests/router/requests/test_mixed_models.py tests it with a ring."""

from dataclasses import replace

import msgspec
import pytest
import structlog

from router.errors import RequestError
from router.parse.model import describe
from router.peers.peers import Peer
from router.requests.request_state import RequestState
from router.requests.serving_model import ServingModel, engines_by_model
from sluice.v1 import generation_pb2 as pb
from sluice.wire.errors import ErrorCode
from sluice.wire.heartbeats import EngineHeartbeat
from sluice.wire.rows import Started, TextRow
from sluice.wire.stats import StepStats
from tests.router.parse.test_parse import spec_of
from tests.router.requests.states import submit


@pytest.fixture
def live(checkpoint):
    return RequestState(1, spec_of(pb.GenerationSpec(text="t"), describe(checkpoint)))


def engines(*models: str) -> list[Peer]:
    peers = []
    for number, model in enumerate(models):
        peer = Peer(f"ipc://{number}", frozenset(), None)
        peer.on_heartbeat(EngineHeartbeat(f"engine-{number}", number, peer.address, model, 64, False, StepStats()), 0.0)
        peers.append(peer)
    return peers


def versions(*labels: str) -> list[Peer]:
    """Engines with these versions, where the version is also the fingerprint of the model."""
    peers = engines(*labels)
    for peer in peers:
        peer.heartbeat = msgspec.structs.replace(peer.heartbeat, model_version=peer.heartbeat.fingerprint)
    return peers


def serving(mixing: bool = False, version: str = "") -> tuple[ServingModel, list[dict]]:
    logs: list[dict] = []

    def record(_, __, event):
        logs.append(event)
        raise structlog.DropEvent

    return ServingModel(mixing, structlog.wrap_logger(None, processors=[record]), version), logs


def models(peers: list[Peer]) -> list[str]:
    return [peer.heartbeat.fingerprint for peer in peers]


def test_the_model_of_most_engines_serves_new_requests(live):
    model, _ = serving()
    assert models(model.engines_for(live, engines("a", "b", "b"))) == ["b", "b"]
    assert models(model.engines_for(live, engines("a", "a", "a", "b", "b"))) == ["a", "a", "a"]


def test_on_a_tie_a_new_router_uses_the_smallest_fingerprint(live):
    assert serving()[0].choose(engines("b", "a", "c")) == "a"
    assert models(serving()[0].engines_for(live, engines("b", "a"))) == ["a"]


def test_on_a_tie_the_model_does_not_change(live):
    model, logs = serving()
    model.engines_for(live, engines("b"))
    assert models(model.engines_for(live, engines("a", "b"))) == ["b"]
    # One engine of the other model joins and leaves, as in a restart.
    for ring in (("a", "a", "b", "b"), ("a", "b", "b"), ("a", "a", "b", "b")):
        assert set(models(model.engines_for(live, engines(*ring)))) == {"b"}
    assert not logs
    assert set(models(model.engines_for(live, engines("a", "a", "b")))) == {"a"}
    assert [(line["model"], line["former"]) for line in logs] == [("a", "b")]


def test_choose_does_not_change_the_state(live):
    model, _ = serving()
    assert model.choose(engines("b")) == "b"
    assert model.choose(engines("a", "b")) == "a"
    assert model.choose([]) == ""


def test_a_bound_request_keeps_its_model(live):
    submit(live, "b")
    live.log.mark_start_delivered()
    model, _ = serving()
    assert models(model.engines_for(live, engines("a", "a", "b"))) == ["b"]
    assert model.engines_for(live, engines("a", "a")) == []
    assert model.choose(engines("a", "a", "b")) == "a"


def test_if_models_are_mixed_a_bound_request_prefers_its_own(live):
    model, _ = serving(mixing=True)
    assert models(model.engines_for(live, engines("a", "b"))) == ["a", "b"]
    submit(live, "b")
    live.log.mark_start_delivered()
    assert models(model.engines_for(live, engines("a", "b"))) == ["b"]
    assert models(model.engines_for(live, engines("a", "a"))) == ["a", "a"]
    model.check(live, engines("a"))
    assert model.choose(engines("a", "b")) == ""


@pytest.mark.parametrize("mixing", [False, True])
def test_new_requests_go_to_the_version_that_the_operator_has_set(live, mixing):
    model, logs = serving(mixing, "v2")
    assert models(model.engines_for(live, versions("v1", "v1", "v2"))) == ["v2"]
    assert not logs


def test_the_version_counts_among_engines_of_one_model_too(live):
    model, _ = serving(version="v2")
    peers = engines("a", "a")
    peers[1].heartbeat = msgspec.structs.replace(peers[1].heartbeat, model_version="v2")
    assert model.engines_for(live, peers) == peers[1:]


def test_a_bound_request_keeps_its_model_whichever_version_is_set(live):
    submit(live, "v1")
    live.log.mark_start_delivered()
    model, _ = serving(version="v2")
    assert models(model.engines_for(live, versions("v1", "v2", "v2"))) == ["v1"]


def test_while_no_engine_has_the_version_the_most_common_model_serves_which_is_logged_once(live):
    model, logs = serving(version="v3")
    for _ in range(3):
        assert models(model.engines_for(live, versions("v1", "v2", "v2"))) == ["v2", "v2"]
        assert model.engines_for(live, []) == []
    assert models(model.engines_for(live, versions("v1", "v1", "v3"))) == ["v3"]
    events = [line["event"] for line in logs]
    assert events.count("serving_version_missing") == events.count("serving_version_found") == 1


def test_a_version_may_be_set_at_any_time(live):
    model, logs = serving(version="v1")
    ring = versions("v1", "v1", "v2")
    assert model.set_version("v2", ring) == "v1"
    assert models(model.engines_for(live, ring)) == ["v2"]
    assert (model.version, model.count(ring)) == ("v2", 1)
    assert model.set_version("v1", ring) == "v2"
    assert models(model.engines_for(live, ring)) == ["v1", "v1"]
    assert model.set_version("", ring) == "v1"
    assert (models(model.engines_for(live, ring)), model.count(ring)) == (["v1", "v1"], 3)
    logged = [
        (line["former"], line["version"], line["engines"]) for line in logs if line["event"] == "serving_version_set"
    ]
    assert logged == [("v1", "v2", 1), ("v2", "v1", 2), ("v1", "", 3)]


def test_setting_the_same_version_again_has_no_effect():
    model, logs = serving()
    assert [model.set_version("v2", versions("v1", "v2")) for _ in range(3)] == ["", "v2", "v2"]
    assert len(logs) == 1


def test_a_version_that_no_engine_has_is_refused_and_nothing_changes(live):
    model, logs = serving(version="v1")
    unlabelled = engines("a")
    for peers, problem in (
        (versions("v2", "v1", "v2"), "must be one of 'v1', 'v2'"),
        (unlabelled, "but no engine that accepts work has a version"),
    ):
        with pytest.raises(RequestError) as error:
            model.set_version("v3\n", peers)
        assert error.value.code is ErrorCode.MODEL_NOT_FOUND
        assert error.value.message == rf"version is 'v3\n', {problem}"
    assert model.version == "v1"
    assert not logs


def test_only_some_of_many_versions_are_named():
    with pytest.raises(RequestError) as error:
        serving()[0].set_version("v", versions(*(f"v{number:03}" for number in range(500))))
    assert error.value.message.endswith("'v014', 'v015', …")


def test_each_missing_version_is_logged_once(live):
    model, logs = serving(version="v1")
    for ring in (("v2",), ("v2", "v3")):
        model.engines_for(live, versions(*ring))
    model.set_version("v2", versions("v2", "v3"))
    for ring in (("v2", "v3"), ("v3",), ("v3",)):
        model.engines_for(live, versions(*ring))
    assert [(line["event"], line["version"]) for line in logs if "version" in line] == [
        ("serving_version_missing", "v1"),
        ("serving_version_set", "v2"),
        ("serving_version_missing", "v2"),
    ]


def start_delivered(live):
    live.log.mark_start_delivered()


def received_tokens(live):
    live.on_started(Started(1, 0, 1, 0))
    live.log.append(TextRow(1, 0, 0, 0, [5], [], "x", None))


def ended_a_sequence(live):
    live.on_terminal(0)


@pytest.mark.parametrize("event", [start_delivered, received_tokens, ended_a_sequence])
def test_events_that_bind_a_request(live, event):
    assert not live.bound
    submit(live, "a")
    assert not live.bound
    event(live)
    assert live.bound


def test_a_resumed_stream_is_bound_from_the_beginning(live):
    assert RequestState(1, replace(live.spec, resume_model="a")).bound


def test_it_is_logged_when_a_ring_becomes_mixed_and_when_it_no_longer_is():
    model, logs = serving()
    for ring in (("a", "a"), (), ("a", "b"), ("b", "a"), (), ("b", "b"), ("b", "b")):
        model.watch(engines(*ring))
    assert [line["event"] for line in logs] == ["models_diverged", "models_converged"]
    assert logs[0]["engines"] == {"a": ["engine-0"], "b": ["engine-1"]}
    assert logs[1]["model"] == "b"


def test_only_engines_with_heartbeats_count():
    peers = engines("a", "b")
    peers[1].alive = False
    assert engines_by_model(peers) == {"a": ["engine-0"]}
