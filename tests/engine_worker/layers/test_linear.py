import pytest
import torch

from engine_worker.layers.linear import Linear
from engine_worker.layers.packing import Packer
from engine_worker.layers.shard import Place

CPU = torch.device("cpu")


def linear(inputs: int, outputs: int, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> Linear:
    random = torch.Generator().manual_seed(0)
    layer = Linear(inputs, outputs, Place(dtype, CPU), bias=bias)
    for weight in layer.targets().values():
        weight.copy_(torch.randn(weight.shape, generator=random))
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 3), (64, 200), (640, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_computes_the_same(inputs, outputs, bias, dtype):
    layer = linear(inputs, outputs, bias=bias, dtype=dtype)
    x = torch.randn(70, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = layer(x)
    layer.pack(Packer())
    assert ("weight" in layer.targets()) == (dtype != torch.float32)
    for rows in (1, 2, 3, 16, 17, 70):
        torch.testing.assert_close(layer(x[:rows]), expected[:rows], atol=1e-3, rtol=2e-2 if bias else 1e-3)
    torch.testing.assert_close(layer(x.T.contiguous().T[:5]), expected[:5], atol=1e-3, rtol=2e-2)
