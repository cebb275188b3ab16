import pytest

from engine_worker.parallel.rank_env import RankEnv, read_rank_env

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def test_without_a_launcher():
    assert read_rank_env(1, {}) == RankEnv(0, 1, 0, 1)
    assert read_rank_env(4, {"MASTER_ADDR": "left over"}) == RankEnv(0, 4, 0, 4)


def test_with_torchrun():
    assert read_rank_env(4, TORCHRUN) == RankEnv(3, 4, 1, 2, external=True, master="node-0")


def test_one_rank_alone_needs_no_group():
    assert read_rank_env(1, TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) == RankEnv(0, 1, 0, 1)


def test_contradictions():
    with pytest.raises(ValueError, match="WORLD_SIZE = 4, but tensor_parallel = 2"):
        read_rank_env(2, TORCHRUN)
    with pytest.raises(ValueError, match="WORLD_SIZE = 4, but tensor_parallel = 1"):
        read_rank_env(1, TORCHRUN)
    with pytest.raises(ValueError, match="but not MASTER_PORT"):
        read_rank_env(4, {name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"})
