"""Who is new at an address, and who only late."""

from sluice.ring.heartbeats import MAX_FORMER, Epochs


def test_the_first_replaces_nobody():
    assert not Epochs().replaced_by(1)
    assert not Epochs().is_former(1)
    assert Epochs().met(0) == Epochs(0)


def test_a_new_one_replaces_the_latest_once_and_a_former_one_nobody():
    met = Epochs().met(1)
    assert not met.replaced_by(1)
    assert met.replaced_by(2)
    met = met.met(2)
    assert met == Epochs(2, (1,))
    assert met.is_former(1)
    assert not met.replaced_by(1)
    assert met.met(1) == met == met.met(2)


def test_so_many_are_remembered():
    met = Epochs()
    for epoch in range(MAX_FORMER + 3):
        met = met.met(epoch)
    assert met.former == tuple(range(2, MAX_FORMER + 2))
