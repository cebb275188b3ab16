"""A model gets fused kernels if they pass their tests on every rank, otherwise it runs without them."""

import pytest
import torch

from engine_worker.attention import backend
from engine_worker.attention.backend import HeadShape
from engine_worker.layers.shard import UNSHARDED, Shard
from engine_worker.runner.fusing import fuse, no_kernels, triton_kernels
from engine_worker.sampling.choose import TORCH, SamplingKernels
from engine_worker.sampling.filters import torch_thresholds
from engine_worker.sampling.noise import torch_gumbel_max
from tests.engine_worker.models.test_fused import RandomModel
from tests.fakes.kernels import CountedKernels

CPU = torch.device("cpu")


def gumbel_max(*arguments):
    """Equal to torch's."""
    return torch_gumbel_max(*arguments)


def other_gumbel_max(*arguments):
    sums, tokens = torch_gumbel_max(*arguments)
    return sums, tokens.roll(1, 1) if tokens.shape[1] > 1 else (tokens + 1) % 3001


def thresholds(*arguments):
    """Equal to torch's."""
    return torch_thresholds(*arguments)


def lower_thresholds(*arguments):
    thresholds, valid = torch_thresholds(*arguments)
    return thresholds - 0.01, valid


def thresholds_for_nothing(*arguments):
    thresholds, valid = torch_thresholds(*arguments)
    return thresholds, torch.ones_like(valid)


SAMPLING = SamplingKernels(gumbel_max, thresholds)


def fused(kernels, sampling=SAMPLING, shard=UNSHARDED, dtype=torch.float32):
    """(summary, whether the model uses the kernels, sampling kernels)."""
    made = RandomModel("qwen3, tied")
    result = fuse(made.model, made.model.config.heads, dtype, CPU, shard, lambda _: (kernels, sampling))
    return result.summary, made.model._kernels is kernels, result.sampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_correct_kernels_are_used(dtype):
    assert fused(CountedKernels().kernels, dtype=dtype) == ("layers and sampling", True, SAMPLING)


@pytest.mark.parametrize(
    ("name", "wrong", "what"),
    [
        ("norm", lambda x, update, weight, eps: x * weight, "in a test, the norm is off by "),
        ("norm", lambda x, update, weight, eps: torch.full_like(x, torch.nan), "in a test, the norm is off by nan"),
        ("rotate", lambda x, rotations, weight, eps: x.clone(), "in a test, the rotation is off by "),
        ("gate", lambda x: x.chunk(2, -1)[0], "in a test, the gate is off by "),
        ("product", lambda x, weight: x @ weight.T.roll(1, 1), "in a test, the product is off by "),
    ],
)
@torch.inference_mode()
def test_a_wrong_kernel_is_rejected(name, wrong, what):
    summary, used, sampling = fused(CountedKernels().kernels._replace(**{name: wrong}))
    assert summary.startswith(f"no: {what}")
    assert not used
    assert sampling is TORCH


@torch.inference_mode()
def test_a_norm_that_does_not_update_its_input_is_rejected():
    kernels = CountedKernels().kernels

    def norm(x, update, weight, eps):
        return kernels.norm(x.clone(), update, weight, eps)

    assert fused(kernels._replace(norm=norm))[0].startswith("no: in a test, the sum is off by ")


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"gumbel_max": other_gumbel_max}, "sampling chose other tokens"),
        ({"thresholds": lower_thresholds}, "other tokens passed top-k, top-p and min-p"),
        ({"thresholds": thresholds_for_nothing}, "a row without a finite score was reported as valid"),
    ],
)
@torch.inference_mode()
def test_a_wrong_sampling_kernel_is_rejected(wrong, what):
    result = fused(CountedKernels().kernels, SAMPLING._replace(**wrong))
    assert result == (f"no: in a test, {what}", False, TORCH)


@torch.inference_mode()
def test_a_compiler_error_is_the_reason():
    def broken(x):
        raise RuntimeError("no C compiler\nand much more")

    kernels = CountedKernels().kernels._replace(gate=broken)
    assert fused(kernels) == ("no: no C compiler", False, TORCH)


@torch.inference_mode()
def test_all_ranks_or_none():
    class Second(Shard):
        def __init__(self) -> None:
            self.proposed: list[int] = []

        def all_min(self, number: int) -> int:
            self.proposed.append(number)
            return 0

    shard, broken = Second(), CountedKernels().kernels._replace(gate=lambda x: x)
    assert fused(CountedKernels().kernels, shard=shard) == ("no: another rank cannot", False, TORCH)
    assert fused(broken, shard=shard)[0] != "no: another rank cannot"
    assert shard.proposed == [1, 0]


@torch.inference_mode()
def test_a_model_of_transformers_gets_only_the_sampling_kernels():
    model = type("Adapter", (), {"config": RandomModel("llama").model.config})()
    result = fuse(
        model, HeadShape(4, 2, 16), torch.float32, CPU, UNSHARDED, lambda _: (CountedKernels().kernels, SAMPLING)
    )
    assert result == (SAMPLING, "sampling; the layers are transformers'")


def test_a_cpu_has_no_kernels():
    with pytest.raises(ValueError, match="the device is a CPU"):
        triton_kernels(CPU)


@torch.inference_mode()
def test_a_kernel_that_breaks_the_context_is_named_with_the_setting_to_disable_it(monkeypatch):
    def broken(x):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(backend, "synchronize", lambda device: broken(None))
    with pytest.raises(backend.BrokenDeviceError, match=r"fused Triton kernel broke .* fused_kernels = false"):
        fused(CountedKernels().kernels._replace(gate=broken))


@torch.inference_mode()
def test_kernels_can_be_disabled():
    made = RandomModel("qwen3, tied")
    result = fuse(made.model, made.model.config.heads, torch.float32, CPU, UNSHARDED, no_kernels)
    assert result.summary == "no: fused_kernels = false"
    assert result.sampling is TORCH
