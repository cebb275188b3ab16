import torch

from engine_worker.attention.cache import KVCache, store_by_torch
from tests.fakes.graphs import Recording


def test_padding_is_written_to_no_block_and_without_waiting_for_the_device():
    pool = KVCache(2, 2, 3, 1, 4, torch.float32, torch.device("cpu"))
    first, second = pool.layers
    key, value = torch.ones(4, 1, 4), torch.full((4, 1, 4), 2.0)
    slots = torch.tensor([-1, 0, 4, -1])
    with Recording():
        store_by_torch(first, key, value, slots)
    assert first.keys.view(6, 4).eq(torch.tensor([[1], [0], [0], [0], [1], [0]])).all()
    assert torch.equal(first.values, 2 * first.keys)
    assert not second.keys.any()
    assert not second.values.any()
