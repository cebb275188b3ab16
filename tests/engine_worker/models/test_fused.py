"""A fused model computes the same as without kernels, and uses a kernel wherever there is one."""

import pytest
import torch

from engine_worker.attention.cache import KVCache
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.shard import Place
from engine_worker.models.registry import model_class
from engine_worker.runner.torch_forward import TorchForward
from engine_worker.step import Draw, Slice
from sluice.wire.params import SamplingParams
from tests.engine_worker.models.checkpoints import CONFIGS
from tests.fakes.kernels import CountedKernels

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


class RandomModel:
    """A small model with random weights, and one step."""

    def __init__(self, name: str) -> None:
        config = CONFIGS[name]
        raw = config.to_dict() | {"architectures": [type(config).__name__.replace("Config", "ForCausalLM")]}
        architecture = model_class(raw)
        shape = architecture.read_config(raw)
        backend = ReferenceAttention(shape.heads)
        self.model = architecture(shape, backend, Place(torch.float32, CPU))
        generator = torch.Generator().manual_seed(0)
        for target in self.model.targets().values():
            target.copy_(torch.randn(target.shape, generator=generator) * 0.3)
        self.model.freeze()
        sizes = (4, shape.heads.num_kv_heads, shape.heads.head_dim)
        cache = KVCache(shape.num_layers, 4, *sizes, torch.float32, CPU)
        self._forward = TorchForward(self.model, cache, backend, CPU)

    def logits(self, *, rows: int = 2) -> torch.Tensor:
        """Logits of a step with a sequence's single token, and (if rows is 2) another sequence's context."""
        slices = [
            Slice([10], 0, [2], (Draw(GREEDY, 0, 0),)),
            Slice([5, 6, 7, 8, 9], 0, [0, 1], (Draw(GREEDY, 0, 0),)),
        ][:rows]
        return self._forward.logits((), self._forward.prepare(self._forward.arrays(slices)))


@pytest.mark.parametrize("name", ["qwen3, tied", "qwen3, biased", "llama, biased, linear rope", "qwen2"])
@torch.inference_mode()
def test_fused_layers(name):
    random_model, counted = RandomModel(name), CountedKernels()
    expected = random_model.logits()
    assert not counted.launches
    random_model.model.fuse(counted.kernels)
    torch.testing.assert_close(random_model.logits(), expected, atol=1e-3, rtol=1e-3)
    layers = random_model.model.config.num_layers
    assert counted.launches == {"norm": 2 * layers + 1, "rotate": layers, "gate": layers}


@pytest.mark.parametrize(("name", "biased"), [("qwen3, tied", 0), ("qwen2", 1)])
@torch.inference_mode()
def test_matrix_products_of_a_single_row(name, biased):
    """They are computed by the kernel, except products with a bias."""
    random_model, counted = RandomModel(name), CountedKernels()
    expected = random_model.logits(rows=1)
    random_model.model.fuse(counted.kernels)
    torch.testing.assert_close(random_model.logits(rows=1), expected, atol=1e-3, rtol=1e-3)
    assert counted.launches["product"] == (4 - biased) * random_model.model.config.num_layers + 1


@torch.inference_mode()
def test_products_of_experts_are_computed_by_torch():
    random_model, counted = RandomModel("qwen3 moe"), CountedKernels()
    expected = random_model.logits()
    random_model.model.fuse(counted.kernels)
    torch.testing.assert_close(random_model.logits(), expected, atol=1e-3, rtol=1e-3)
    layers = random_model.model.config.num_layers
    assert counted.launches == {"norm": 2 * layers + 1, "rotate": layers, "gate": layers}
