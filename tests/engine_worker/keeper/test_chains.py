from hypothesis import given
from hypothesis import strategies as st

from engine_worker.keeper.chains import long_chains
from tests.engine_worker.keeper.keepers import digests
from tests.engine_worker.pool_files.files import digest


def chains(parents: dict[int, int | None], least: int) -> list[list[int]]:
    hashed = {digest(child): None if parent is None else digest(parent) for child, parent in parents.items()}
    return [[int.from_bytes(block, "little") for block in chain] for chain in long_chains(hashed, least)]


def test_short_chains_are_left_out() -> None:
    assert chains({0: None, 1: 0, 2: 1, 10: None, 11: 10}, 3) == [[0, 1, 2]]


def test_chains_without_their_beginning_are_left_out() -> None:
    assert chains({1: 0, 2: 1, 3: 2, 10: None, 12: 11, 13: 12}, 1) == [[10]]


def test_branches_share_their_beginning() -> None:
    """The short branch is left out, the beginning of the long ones is not."""
    parents = {0: None, 1: 0, 2: 1, 3: 2, 12: 1, 13: 12, 20: 0}
    assert sorted(chains(parents, 4)) == [[0, 1, 2, 3], [0, 1, 12, 13]]


def test_circles_of_damaged_entries_end_nothing() -> None:
    assert chains({0: 2, 1: 0, 2: 1, 3: 2, 5: 5}, 1) == []


def test_chains_may_be_long() -> None:
    length = 20_000
    [chain] = long_chains(dict(zip(digests(range(length)), [None, *digests(range(length))], strict=False)), 512)
    assert chain == digests(range(length))


@given(st.dictionaries(st.integers(0, 12), st.none() | st.integers(0, 12)), st.integers(1, 4))
def test_chains_are_whole_and_cover_every_long_prefix(parents: dict[int, int | None], least: int) -> None:
    found = chains(parents, least)
    for chain in found:
        assert len(chain) >= least
        assert [parents[block] for block in chain] == [None, *chain[:-1]]
    long = {block for digest in parents if len(chain := prefix(parents, digest)) >= least for block in chain}
    assert {block for chain in found for block in chain} == long


def prefix(parents: dict[int, int | None], block: int) -> list[int]:
    """The blocks up to this one; empty if one is missing."""
    path: list[int] = []
    at: int | None = block
    while at is not None:
        if at not in parents or at in path:
            return []
        path.append(at)
        at = parents[at]
    return path
