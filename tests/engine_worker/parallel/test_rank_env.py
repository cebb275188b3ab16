import pytest

from engine_worker.parallel.rank_env import Place, find_place

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def test_by_itself():
    assert find_place(1, {}) == Place(0, 1, 0, 1)
    assert find_place(4, {"MASTER_ADDR": "left over"}) == Place(0, 4, 0, 4)


def test_by_torchrun():
    assert find_place(4, TORCHRUN) == Place(3, 4, 1, 2, given=True, master="node-0")


def test_one_rank_alone_needs_no_group():
    assert find_place(1, TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) == Place(0, 1, 0, 1)


def test_what_does_not_go_together():
    with pytest.raises(ValueError, match="WORLD_SIZE = 4, but tensor_parallel = 2"):
        find_place(2, TORCHRUN)
    with pytest.raises(ValueError, match="WORLD_SIZE = 4, but tensor_parallel = 1"):
        find_place(1, TORCHRUN)
    with pytest.raises(ValueError, match="MASTER_PORT is not"):
        find_place(4, {name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"})
