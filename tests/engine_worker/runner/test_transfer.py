from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from engine_worker.runner.batch import (
    ALIGNED,
    arrays_to_device,
    pack,
    to_device,
    unpack,
)

CPU = torch.device("cpu")
ARRAYS = st.lists(
    st.sampled_from(["int64", "int32", "float64", "float32", "bool"]).flatmap(
        lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5))
    ),
    max_size=6,
)


@given(ARRAYS)
def test_packing_and_unpacking_changes_nothing(arrays):
    buffer = pack(arrays)
    for array, tensor in zip(arrays, unpack(buffer, arrays), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert (tensor.data_ptr() - buffer.data_ptr()) % ALIGNED == 0 or not array.size


@given(ARRAYS)
def test_a_cpu_needs_no_copy(arrays):
    for array, tensor in zip(arrays, arrays_to_device(arrays, CPU), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert not array.size or np.shares_memory(tensor.numpy(), array)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_a_tree_keeps_its_shape():
    tree = Pair((torch.arange(3), None), Pair(7, torch.zeros(2, 2)))
    assert to_device(tree, CPU) is tree
    sent = to_device(tree, torch.device("meta"))
    assert isinstance(sent, Pair)
    assert isinstance(sent.right, Pair)
    assert sent.left[1] is None
    assert sent.right.left == 7
    assert (sent.left[0].dtype, sent.left[0].shape, sent.left[0].device.type) == (torch.int64, (3,), "meta")
    assert (sent.right.right.dtype, sent.right.right.shape) == (torch.float32, (2, 2))
    assert to_device(Pair(1, ()), torch.device("meta")) == Pair(1, ())


def test_another_device_gets_tensors_of_the_same_shapes():
    sent = arrays_to_device([np.arange(3), np.zeros((2, 0), np.int32), np.ones((2, 3), bool)], torch.device("meta"))
    assert [(x.dtype, tuple(x.shape), x.device.type) for x in sent] == [
        (torch.int64, (3,), "meta"),
        (torch.int32, (2, 0), "meta"),
        (torch.bool, (2, 3), "meta"),
    ]
