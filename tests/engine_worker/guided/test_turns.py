"""Turns of tenants: the order of their guides, and how many slots one of them may hold."""

from engine_worker.guided.guides import Preparation, Turns
from sluice.wire.params import Guide, GuideKind


def guides(tenant: str, count: int) -> list[Preparation]:
    found = [Preparation(f"{tenant}{i}".encode(), Guide(GuideKind.JSON_OBJECT, ""), lambda: None) for i in range(count)]
    for guide in found:
        guide.tenants.add(tenant)
    return found


def begun(turns: Turns) -> list[bytes]:
    found = []
    while turns.has_next():
        found.append(turns.begin().key)
    return found


def test_a_tenant_never_holds_the_last_slot():
    turns = Turns(3)
    for guide in guides("a", 5):
        turns.add(guide)
    assert begun(turns) == [b"a0", b"a1"]
    turns.add(guides("b", 1)[0])
    assert begun(turns) == [b"b0"]
    turns.discard(turns.running[b"b0"])
    assert begun(turns) == []


def test_tenants_take_turns():
    turns = Turns(2)
    for guide in (*guides("a", 3), *guides("b", 2)):
        turns.add(guide)
    order = begun(turns)
    while turns.running:
        turns.discard(next(iter(turns.running.values())))
        order += begun(turns)
    assert order == [b"a0", b"b0", b"a1", b"b1", b"a2"]


def test_a_guide_of_two_tenants_comes_when_the_first_of_them_has_its_turn():
    turns = Turns(2)
    *first, shared = guides("a", 5)
    for guide in (*first, shared):
        turns.add(guide)
    shared.tenants.add("b")
    assert begun(turns) == [b"a0", b"a4"]
