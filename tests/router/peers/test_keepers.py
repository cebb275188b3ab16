"""Which keepers of other machines an engine is told to ask."""

import msgspec
import pytest

from router.peers.kv_groups import Computed, KvSite
from router.peers.placement import Placement
from sluice.wire.hashing import Domain
from tests.router.peers.test_placement import DETOKENIZERS, engine, report

PROMPT = range(1000, 1640)
"""40 blocks."""


def member(epoch: int, machine: str, layout: str = "l"):
    """An engine of a machine with a keeper."""
    return msgspec.structs.replace(engine(epoch), kv_group=machine, kv_keeper=f"tcp://{machine}:1", kv_layout=layout)


def keepers(placement: Placement, reader, computed: Computed | None = None) -> tuple[str, ...]:
    given = {} if computed is None else {"computed": computed}
    return placement.choose([reader], DETOKENIZERS, PROMPT, Domain(), 1, **given).keepers


@pytest.fixture
def placement() -> Placement:
    return Placement(1000)


def test_the_keeper_of_the_engine_with_the_longest_prefix(placement: Placement) -> None:
    report(placement, member(1, "a"), PROMPT[:320])
    report(placement, member(2, "b"), PROMPT[:480])
    report(placement, member(3, "c"), PROMPT[:16])
    assert keepers(placement, member(4, "d")) == ("tcp://b:1",)


def test_the_one_that_has_computed_the_request_is_asked_first(placement: Placement) -> None:
    report(placement, member(1, "a"), PROMPT)
    before = Computed(KvSite.of(member(2, "b")), 5)
    assert keepers(placement, member(3, "c"), before) == ("tcp://b:1", "tcp://a:1")
    assert keepers(placement, member(3, "c"), Computed(KvSite.of(member(1, "a")), 5)) == ("tcp://a:1",)


def test_another_one_is_named_in_case_the_first_is_lost(placement: Placement) -> None:
    report(placement, member(1, "a"), PROMPT)
    report(placement, member(2, "b"), PROMPT[:480])
    placement.forget(1)
    before = Computed(KvSite.of(member(1, "a")), 5)
    assert keepers(placement, member(3, "c"), before) == ("tcp://a:1", "tcp://b:1")


def test_a_lost_engine_counts_for_a_while(placement: Placement) -> None:
    report(placement, member(1, "a"), PROMPT)
    placement.forget(1)
    assert keepers(placement, member(2, "b")) == ("tcp://a:1",)


@pytest.mark.parametrize(
    "owner",
    [
        pytest.param(member(1, "here"), id="of the same machine"),
        pytest.param(member(1, "a", layout="other"), id="with another layout"),
        pytest.param(msgspec.structs.replace(member(1, "a"), kv_keeper=""), id="without a keeper"),
    ],
)
def test_blocks_that_are_of_no_use(placement: Placement, owner) -> None:
    report(placement, owner, PROMPT)
    assert keepers(placement, member(2, "here")) == ()


def test_what_the_machine_has_is_not_worth_a_question(placement: Placement) -> None:
    """Nor are a few tokens more."""
    report(placement, member(1, "here"), PROMPT[:400])
    report(placement, member(2, "a"), PROMPT)
    assert keepers(placement, member(1, "here")) == ()
    report(placement, member(3, "b"), range(2000, 2320))
    assert keepers(placement, member(3, "b")) == ("tcp://a:1",)


@pytest.mark.parametrize("address", ["ipc:///run/keeper", "tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1"])
def test_an_address_within_a_machine_is_named_only_there(placement: Placement, address: str) -> None:
    report(placement, msgspec.structs.replace(member(1, "a"), kv_keeper=address), PROMPT)
    assert keepers(placement, member(2, "b")) == ()
    assert keepers(placement, msgspec.structs.replace(member(3, "c"), kv_keeper="ipc:///other")) == (address,)


def test_an_engine_without_a_keeper_asks_none(placement: Placement) -> None:
    report(placement, member(1, "a"), PROMPT)
    assert keepers(placement, msgspec.structs.replace(member(2, "b"), kv_keeper="")) == ()
