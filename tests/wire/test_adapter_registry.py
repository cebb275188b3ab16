from hypothesis import given
from hypothesis import strategies as st

from sluice.wire.adapter_registry import REMOVED_SECONDS, AdapterRegistry, merge_all
from sluice.wire.adapters import MAX_ADAPTERS, MAX_MESSAGE_ENTRIES, AdapterEntry, AdapterFiles
from tests.examples import examples

NOW = 1_000_000.0


def entry(name: str, at: float, version: int = 0, removed: bool = False) -> AdapterEntry:
    return AdapterEntry(name, NOW + at, f"{version:032x}", removed=removed)


entries = st.builds(entry, st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 3), st.booleans())


@examples(300)
@given(st.lists(entries, max_size=12), st.randoms(use_true_random=False))
def test_registries_converge_for_any_order_and_repetition_of_changes(changes, random):
    registries = []
    for _ in range(3):
        order = [*changes, *random.choices(changes, k=3)] if changes else []
        random.shuffle(order)
        registry = AdapterRegistry()
        merge_all(registry, order, NOW)
        registries.append({each.id: each for each in registry.entries()})
    assert registries[0] == registries[1] == registries[2]
    for each in registries[0].values():
        assert not any(other.replaces(each) for other in changes if other.id == each.id)


@examples(200)
@given(st.lists(st.tuples(st.integers(0, 2), entries | st.none()), max_size=30))
def test_gossip_through_numbered_changes_converges(steps):
    """Three registries. Each step changes one of them, or lets it read the changes of the next one."""
    nodes, known = [AdapterRegistry() for _ in range(3)], [0, 0, 0]

    def read(node: int) -> bool:
        source = nodes[(node + 1) % 3]
        changes = source.since(known[node])
        if changes is None:
            return False
        known[node] = changes.last
        merge_all(nodes[node], changes.entries, NOW)
        return True

    for node, change in steps:
        if change is None:
            read(node)
        else:
            nodes[node].merge(change, NOW)
    reading = True
    while reading:
        read_some = [read(node) for node in range(3)]
        reading = any(read_some)
    assert len({frozenset((each.id, each.version, each.removed) for each in node.entries()) for node in nodes}) == 1


def test_the_latest_change_wins_over_older_ones():
    registry = AdapterRegistry()
    assert registry.merge(entry("a", 1, version=1), NOW)
    assert registry.merge(entry("a", 2, version=2), NOW)
    assert not registry.merge(entry("a", 1, version=1), NOW)
    assert registry.find("a") == entry("a", 2, version=2)
    assert registry.merge(entry("a", 3, removed=True), NOW)
    assert registry.find("a") is None
    assert not registry.merge(entry("a", 2, version=2), NOW)


def test_changes_are_sent_in_bounded_parts_and_completely_to_readers_of_another_process():
    registry = AdapterRegistry()
    for i in range(MAX_MESSAGE_ENTRIES + 1):
        registry.merge(entry(f"a{i}", i), NOW)
    first = registry.since(0)
    second = registry.since(first.last)
    assert (len(first.entries), len(second.entries), registry.since(second.last)) == (MAX_MESSAGE_ENTRIES, 1, None)
    assert registry.since(10**9) == first


def test_the_number_of_adapters_is_bounded():
    registry = AdapterRegistry()
    for i in range(MAX_ADAPTERS):
        assert registry.merge(entry(f"a{i}", 0), NOW)
    assert not registry.merge(entry("one more", 1), NOW)
    assert registry.merge(entry("a0", 1, version=5), NOW)
    assert registry.merge(entry("a1", 1, removed=True), NOW)
    assert registry.merge(entry("one more", 1), NOW)
    assert len(registry) == MAX_ADAPTERS


def test_a_removal_is_forgotten_after_a_while():
    registry = AdapterRegistry()
    registry.merge(entry("a", 0, removed=True), NOW)
    registry.merge(entry("b", 0), NOW + REMOVED_SECONDS + 10)
    assert [each.id for each in registry.entries()] == ["b"]
    assert not registry.merge(entry("a", 0, removed=True), NOW + REMOVED_SECONDS + 10)


def test_an_expired_removal_is_not_sent():
    """Engines do not accept an expired removal, so it would be sent again every second."""
    registry = AdapterRegistry()
    registry.merge(entry("a", 0, removed=True), NOW)
    assert registry.missing_in(AdapterRegistry(), NOW) == registry.entries()
    assert not registry.missing_in(AdapterRegistry(), NOW + REMOVED_SECONDS + 10)


def test_the_version_depends_on_both_files():
    versions = {AdapterFiles(b"ab", b"c").version, AdapterFiles(b"a", b"bc").version, AdapterFiles(b"a", b"bd").version}
    assert len(versions) == 3
