import torch

from engine_worker.attention.cache import KVCache, store_by_torch
from tests.fakes.graphs import Recording


def test_padding_is_written_where_no_block_is_and_nobody_waits():
    pool = KVCache(2, 2, 3, 1, 4, torch.float32, torch.device("cpu"))
    first, other = pool.layers
    key, value = torch.ones(4, 1, 4), torch.full((4, 1, 4), 2.0)
    slots = torch.tensor([-1, 0, 4, -1])
    with Recording():
        store_by_torch(first, key, value, slots)
    assert first.keys.view(6, 4).eq(torch.tensor([[1], [0], [0], [0], [1], [0]])).all()
    assert torch.equal(first.values, 2 * first.keys)
    assert not other.keys.any()
    assert not other.values.any()
