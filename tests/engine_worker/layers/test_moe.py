import pytest
import torch
import torch.nn.functional as F

from engine_worker.layers.moe import ExpertShape, SparseMoE
from engine_worker.layers.shard import Place

CPU = torch.device("cpu")


def layer(shape: ExpertShape, dtype: torch.dtype = torch.float32) -> SparseMoE:
    moe = SparseMoE(16, shape, Place(dtype, CPU))
    random = torch.Generator().manual_seed(0)
    for weight in moe.targets().values():
        weight.normal_(0.0, 0.5, generator=random)
    return moe


def by_definition(weights: dict[str, torch.Tensor], shape: ExpertShape, x: torch.Tensor) -> torch.Tensor:
    probabilities, chosen = (x @ weights["gate.weight"].T).softmax(-1).topk(shape.num_chosen)
    if shape.normalized:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, expert in zip(probabilities[row], chosen[row].tolist(), strict=True):
            gate, up, down = (weights[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            out[row] += weight * (down @ (F.silu(gate @ x[row]) * (up @ x[row])))
    return out


@pytest.mark.parametrize("tokens", [1, 2, 37])
@pytest.mark.parametrize(
    "shape",
    [ExpertShape(8, 2, 24, normalized=False), ExpertShape(4, 4, 8, normalized=True), ExpertShape(1, 1, 8, True)],
)
def test_equals_the_definition(shape, tokens):
    moe = layer(shape)
    weights = {name: weight.clone() for name, weight in moe.targets().items()}
    moe.freeze()
    x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens))
    torch.testing.assert_close(moe(x), by_definition(weights, shape, x), atol=1e-5, rtol=1e-5)


def test_experts_without_tokens_do_not_affect_the_result():
    shape = ExpertShape(64, 1, 8, normalized=True)
    moe = layer(shape)
    weights = {name: weight.clone() for name, weight in moe.targets().items()}
    x = torch.randn(1, 16).expand(5, -1)
    torch.testing.assert_close(moe(x), by_definition(weights, shape, x), atol=1e-5, rtol=1e-5)


def test_half_precision():
    torch.manual_seed(0)
    shape = ExpertShape(8, 2, 24, normalized=True)
    moe = layer(shape, torch.bfloat16)
    x = torch.randn(9, 16)
    expected = by_definition({name: weight.float() for name, weight in moe.targets().items()}, shape, x)
    torch.testing.assert_close(moe(x.bfloat16()).float(), expected, atol=0.1, rtol=0.1)
