"""The memory for bodies: its limits, and who has to make room."""

import pytest

from gateway.byte_budget import ByteBudget, OverBudget


def test_one_peer_gets_half() -> None:
    budget = ByteBudget(100)
    with budget.share("a") as first, budget.share("a") as second, budget.share("b") as other:
        first.add(30)
        second.add(20)
        with pytest.raises(OverBudget, match="this client or token exceed 50 bytes"):
            second.add(1)
        other.add(50)
    assert budget.used == 0
    assert budget.refused == 1


def test_the_peer_with_most_uploads_makes_room() -> None:
    budget, evicted = ByteBudget(100), []
    large, small = budget.share("a"), budget.share("a")
    large.add(30)
    small.add(20)
    complete = budget.share("b")
    complete.add(50)
    large.evict, small.evict = (lambda: evicted.append("large")), (lambda: evicted.append("small"))
    honest = budget.share("c")
    honest.add(10)
    assert evicted == ["large"]
    assert large.evict is None
    assert budget.used == 80
    budget.share("d").add(20)
    # What is left of the peer is not more than what the newcomer wants, and complete requests make no room.
    with pytest.raises(OverBudget, match="all clients exceed 100 bytes"):
        budget.share("e").add(20)


def test_bytes_move_to_the_peer_that_is_known_later() -> None:
    budget = ByteBudget(100)
    share = budget.share("address")
    share.add(40)
    share.move("token")
    budget.share("address").add(50)
    late = budget.share("other")
    late.add(10)
    budget.free(share)
    late.move("token")
    assert budget.used == 60
    with pytest.raises(OverBudget):
        budget.share("token").add(41)
