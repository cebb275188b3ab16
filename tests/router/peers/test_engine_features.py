"""Features of engines: before the first heartbeat, of differing engines, of lost engines."""

import pytest
import zmq

from router.peers.engine_features import EngineFeatures
from router.peers.peers import Peers
from sluice.wire.heartbeats import EngineHeartbeat, Hello
from sluice.wire.stats import StepStats

MODEL_TOKENS = 1000
ADDRESSES = [f"ipc:///nowhere/engine-{number}" for number in range(2)]


@pytest.fixture
def peers():
    with zmq.Context() as context:
        peers: Peers[EngineHeartbeat] = Peers(context, lambda _: Hello("router", "ipc:///nowhere/router"), 5.0, 30.0)
        peers.set_addresses({address: frozenset({address}) for address in ADDRESSES})
        yield peers
        peers.close()


@pytest.fixture
def features(peers):
    return EngineFeatures(peers, MODEL_TOKENS)


def report(peers, number: int, tokens: int, **offers) -> None:
    here = f"e{number}", number + 1, ADDRESSES[number]
    offers["challenge"] = peers.all[number].challenge
    heartbeat = EngineHeartbeat(*here, "f", tokens, False, StepStats(), **offers)
    peers.on_heartbeat(heartbeat, 0.0)


def test_before_the_first_heartbeat(features):
    assert features.context_tokens == MODEL_TOKENS
    assert features.processors is features.tensors is features.hidden_sizes is features.image_rows is None
    assert features.has_adapters is None


def test_engines_that_differ(peers, features):
    report(peers, 0, 300, logits_processors=["a", "b"], hidden_size=64, has_adapters=True)
    report(peers, 1, 500, logits_processors=["b", "c"], tensors=["hidden"], image_rows=9)
    assert features.context_tokens == 500
    assert (features.processors, features.tensors) == ({"a", "b", "c"}, {"hidden"})
    assert (features.hidden_sizes, features.image_rows) == ({64}, {9})
    assert features.has_adapters


def test_the_model_limits_the_context(peers, features):
    report(peers, 0, 5000)
    assert features.context_tokens == MODEL_TOKENS


def test_features_of_a_lost_engine_count(peers, features):
    report(peers, 0, 300, logits_processors=["a"])
    assert peers.mark_silent(1000.0)
    assert features.context_tokens == MODEL_TOKENS
    assert features.processors == {"a"}
    assert features.has_adapters is False
