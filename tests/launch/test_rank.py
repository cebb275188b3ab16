"""The distribution of an engine's ranks over nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.parallel.rank_env import RankEnv, read_rank_env
from sluice.launch.rank import ranks_of, ranks_per_node

COUNTS = st.integers(1, 256)


@pytest.mark.parametrize(("ranks", "gpus", "per_node"), [(16, 8, 8), (6, 4, 3), (7, 4, 1), (2, 8, 2), (12, 8, 6)])
def test_every_node_has_the_same_number_of_ranks_and_the_largest_node_fits_them(ranks, gpus, per_node):
    assert ranks_per_node(ranks, gpus) == per_node


@given(COUNTS, COUNTS)
def test_all_ranks_are_distributed(ranks, gpus):
    per_node = ranks_per_node(ranks, gpus)
    assert per_node <= gpus
    distributed = ranks_of(ranks, per_node)
    assert [rank.number for rank in distributed] == list(range(ranks))
    assert [rank.local for rank in distributed] == list(range(per_node)) * (ranks // per_node)


def test_an_engine_reads_its_rank_from_the_environment():
    for number, rank in enumerate(ranks_of(4, 2)):
        assert read_rank_env(4, rank.environment) == RankEnv(number, 4, number % 2, 2, external=True)
