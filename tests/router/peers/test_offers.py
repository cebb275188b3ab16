"""What engines offer: before the first heartbeat, of differing engines, of lost engines."""

import pytest
import zmq

from router.peers.offers import Offers, offering
from router.peers.peers import Peers
from sluice.wire.heartbeats import EngineHeartbeat, Hello
from sluice.wire.offers import LORA
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
def offers(peers):
    return Offers(peers, MODEL_TOKENS)


def report(peers, number: int, tokens: int, *offers: str) -> None:
    here = f"e{number}", number + 1, ADDRESSES[number]
    challenge = peers.all[number].challenge
    heartbeat = EngineHeartbeat(*here, "f", tokens, False, StepStats(), offers=frozenset(offers), challenge=challenge)
    peers.on_heartbeat(heartbeat, 0.0)


def test_before_the_first_heartbeat(offers):
    assert offers.context_tokens == MODEL_TOKENS
    assert offers.known is None
    assert offers.values("tensor") == []


def test_engines_that_differ(peers, offers):
    report(peers, 0, 300, "logits_processor:b", "logits_processor:a", "prompt_rows:64", LORA)
    report(peers, 1, 500, "logits_processor:c", "logits_processor:b", "tensor:hidden", "image_rows:9")
    assert offers.context_tokens == 500
    assert (offers.values("logits_processor"), offers.values("tensor")) == (["a", "b", "c"], ["hidden"])
    assert (offers.sizes("prompt_rows"), offers.sizes("image_rows")) == ({64}, {9})
    assert LORA in offers.known


def test_an_engine_must_offer_all_that_is_needed(peers):
    report(peers, 0, 300, "tensor:a", "tensor:b")
    report(peers, 1, 300, "tensor:b", LORA)
    named = lambda *needed: [peer.name for peer in offering(set(needed), peers.all)]  # noqa: E731
    assert named() == ["e0", "e1"]
    assert named("tensor:b") == ["e0", "e1"]
    assert named("tensor:b", LORA) == ["e1"]
    assert named("tensor:a", LORA) == []


def test_the_model_limits_the_context(peers, offers):
    report(peers, 0, 5000)
    assert offers.context_tokens == MODEL_TOKENS


def test_offers_of_a_lost_engine_count(peers, offers):
    report(peers, 0, 300, "logits_processor:a")
    assert peers.mark_silent(1000.0)
    assert offers.context_tokens == MODEL_TOKENS
    assert offers.values("logits_processor") == ["a"]
    assert LORA not in offers.known
