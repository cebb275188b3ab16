import numpy as np
import openvino as ov
import pytest

from engine_worker.openvino.cache import BlockCache, BlockShape
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.step import Move, MoveKind
from tests.engine_worker.pool_files.files import check_separate

SHAPES = [([2, 32, 4], ov.Type.f32), ([2, 32, 4], ov.Type.f32), ([2, 40, 4], ov.Type.u8), ([2, 32, 12], ov.Type.u8)]


@pytest.fixture
def cache() -> BlockCache:
    cache = BlockCache(BlockShape(SHAPES), num_blocks=5, num_host_blocks=3)
    random = np.random.default_rng(0)
    for tensor in cache.tensors:
        tensor.data[:] = random.integers(0, 200, tensor.data.shape)
    return cache


def test_sizes(cache):
    sizes = [2 * 32 * 4 * 4, 2 * 32 * 4 * 4, 2 * 40 * 4, 2 * 32 * 12]
    assert BlockShape(SHAPES).sizes == sizes
    assert cache.nbytes == 5 * sum(sizes)
    assert [list(tensor.shape) for tensor in cache.tensors] == [[6, *shape] for shape, _ in SHAPES]


def test_moves_are_exact_and_in_order(cache):
    before = [tensor.data.copy() for tensor in cache.tensors]
    cache.move(
        [
            Move(MoveKind.COPY, 0, 1),
            Move(MoveKind.OFFLOAD, 1, 2),
            Move(MoveKind.COPY, 3, 1),
            Move(MoveKind.ONLOAD, 2, 4),
        ]
    )
    for tensor, old in zip(cache.tensors, before, strict=True):
        np.testing.assert_array_equal(tensor.data[1], old[3])
        np.testing.assert_array_equal(tensor.data[4], old[0])
        for untouched in (0, 2, 3, 5):
            np.testing.assert_array_equal(tensor.data[untouched], old[untouched])


def test_a_cache_starts_as_zeros():
    assert all(not tensor.data.any() for tensor in BlockCache(BlockShape(SHAPES), 2).tensors)


def test_blocks_in_a_file(shared_memory):
    block = BlockShape(SHAPES)
    file = PoolFolder(shared_memory, "a", pytest.fail).open(block.layout, "", lambda: 5)
    cache = BlockCache(block, 5, file=file)
    for number, tensor in enumerate(cache.tensors):
        assert list(tensor.shape) == [6, *SHAPES[number][0]]
        tensor.data[2] = number + 1
    cache.move([Move(MoveKind.COPY, 2, 4)])
    for tensor, part in zip(cache.tensors, file.parts, strict=True):
        assert part[4].any()
        assert part.tobytes() == tensor.data.tobytes()


def test_layouts_differ_by_type_and_shape():
    layouts = [BlockShape([shape]).layout.folder for shape in (*SHAPES, ([2, 64, 2], ov.Type.f32))]
    assert len(set(layouts)) == 4


def test_blocks_of_another_version_are_neither_read_nor_adopted(shared_memory, monkeypatch):
    layout = BlockShape(SHAPES).layout
    monkeypatch.setattr(ov, "__version__", "2030.1.0")
    check_separate(shared_memory, layout, BlockShape(SHAPES).layout)


@pytest.mark.parametrize("types", [(ov.Type.f16, ov.Type.bf16), (ov.Type.u8, ov.Type.i8)])
def test_blocks_of_another_precision_are_neither_read_nor_adopted(shared_memory, types):
    """Also if they have the same size."""
    check_separate(shared_memory, *(BlockShape([([2, 32, 4], kind)]).layout for kind in types))
