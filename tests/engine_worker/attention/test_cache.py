import pytest
import torch

from engine_worker.attention.cache import KVCache, host_layout, layout
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.step import Move, MoveKind
from tests.engine_worker.pool_files.files import check_separate


def cache(dtype: torch.dtype = torch.float32, num_host_blocks: int = 0) -> KVCache:
    return KVCache(3, 5, 4, 2, 8, dtype, torch.device("cpu"), num_host_blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_are_those_of_flash_attn(dtype):
    pool = cache(dtype)
    assert len(pool.layers) == 3
    for layer in pool.layers:
        for blocks in (layer.keys, layer.values):
            assert blocks.shape == (5, 4, 2, 8)
            assert blocks.is_contiguous()
            assert blocks.dtype == dtype
            assert not blocks.any()
    assert 5 * KVCache.block_bytes(3, 4, 2, 8, dtype) == 2 * 3 * pool.layers[0].keys.nbytes


def test_store_writes_slots_and_nothing_else():
    pool = cache()
    key, value = torch.ones(2, 2, 8), torch.full((2, 2, 8), 2.0)
    pool.layers[1].store(key, value, torch.tensor([7, 0]))
    assert pool.layers[1].keys[1, 3].eq(1).all()
    assert pool.layers[1].values[0, 0].eq(2).all()
    assert pool.layers[1].keys.sum() == 2 * 16
    assert not pool.layers[0].keys.any()


def test_copies_are_made_in_order_in_every_layer():
    pool = cache()
    for i, layer in enumerate(pool.layers):
        layer.keys[0] = i + 1
        layer.values[0] = -i - 1
    pool.move([Move(MoveKind.COPY, 0, 3), Move(MoveKind.COPY, 3, 4)])
    for i, layer in enumerate(pool.layers):
        assert layer.keys[4].eq(i + 1).all()
        assert layer.values[4].eq(-i - 1).all()
        assert not layer.keys[1].any()


def test_an_offloaded_block_is_onloaded_unchanged():
    """The moves run in order: block 0 is offloaded and overwritten by block 1, then onloaded to block 4."""
    pool = cache(num_host_blocks=2)
    for i, layer in enumerate(pool.layers):
        layer.keys[0], layer.values[0] = i + 1, -i - 1
        layer.keys[1], layer.values[1] = 10 * i + 7, 10 * i + 8
    moves = [(MoveKind.OFFLOAD, 0, 1), (MoveKind.COPY, 1, 0), (MoveKind.ONLOAD, 1, 4), (MoveKind.OFFLOAD, 1, 1)]
    pool.move(Move(*move) for move in moves)
    pool.move([Move(MoveKind.ONLOAD, 1, 3)])
    for i, layer in enumerate(pool.layers):
        assert layer.keys[4].eq(i + 1).all()
        assert layer.values[4].eq(-i - 1).all()
        for block in (0, 1, 3):
            assert layer.keys[block].eq(10 * i + 7).all()
            assert layer.values[block].eq(10 * i + 8).all()
        assert not layer.keys[2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_in_a_file_has_the_same_place_in_every_part(shared_memory, dtype):
    sizes = (4, 2, 8)
    file = PoolFolder(shared_memory, "a", pytest.fail).open(layout(3, *sizes, dtype), "", lambda: 5)
    pool = KVCache(3, 5, *sizes, dtype, torch.device("cpu"), file=file)
    private = cache(dtype)
    for each in (pool, private):
        for i, layer in enumerate(each.layers):
            key, value = (torch.full((2, 2, 8), i + number, dtype=dtype) for number in (1.0, 10.0))
            layer.store(key, value, torch.tensor([7, 20]))
        each.move([Move(MoveKind.COPY, 1, 3)])
    for layer, other in zip(pool.layers, private.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)
        assert torch.equal(layer.key_columns, other.key_columns)
        assert torch.equal(layer.value_rows, other.value_rows)
    tensors = [*(layer.keys for layer in pool.layers), *(layer.values for layer in pool.layers)]
    for tensor, part in zip(tensors, file.parts, strict=True):
        assert part[:5].tobytes() == tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layout_of", [layout, host_layout])
def test_blocks_of_another_precision_are_neither_read_nor_adopted(shared_memory, layout_of):
    """Also if they have the same size."""
    check_separate(shared_memory, *(layout_of(3, 4, 2, 8, dtype) for dtype in (torch.float16, torch.bfloat16)))
