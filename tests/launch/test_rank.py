"""How the ranks of an engine are spread over nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.parallel.rank_env import RankEnv, read_rank_env
from sluice.launch.rank import ranks_of, ranks_per_node

COUNTS = st.integers(1, 256)


@pytest.mark.parametrize(("ranks", "most", "share"), [(16, 8, 8), (6, 4, 3), (7, 4, 1), (2, 8, 2), (12, 8, 6)])
def test_a_share_fits_the_largest_node_and_is_the_same_on_all(ranks, most, share):
    assert ranks_per_node(ranks, most) == share


@given(COUNTS, COUNTS)
def test_shares_add_up(ranks, most):
    share = ranks_per_node(ranks, most)
    assert share <= most
    found = ranks_of(ranks, share)
    assert [each.number for each in found] == list(range(ranks))
    assert [each.local for each in found] == list(range(share)) * (ranks // share)


def test_an_engine_reads_what_its_rank_says():
    for number, rank in enumerate(ranks_of(4, 2)):
        assert read_rank_env(4, rank.environment) == RankEnv(number, 4, number % 2, 2, external=True)
