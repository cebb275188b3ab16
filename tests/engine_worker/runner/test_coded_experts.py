"""Experts whose quantized matrices are held as stored compute what decoded ones compute."""

from functools import cache

import pytest
import torch

from engine_worker.formats.rounding import rounding_of
from engine_worker.layers.coded import FEW_ROWS
from engine_worker.layers.moe import SparseMoE
from engine_worker.runner.config import RunnerConfig
from tests.engine_worker.formats import checkpoints, gguf_files
from tests.engine_worker.layers.coded_cases import TorchKernels
from tests.engine_worker.models.checkpoints import open_written
from tests.engine_worker.models.loading import Rank
from tests.engine_worker.runner.held import decoded, held, logits

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
LAYERS, EXPERTS = 2, 4
ALL = LAYERS * (4 + 3 * EXPERTS)
"""Matrices of all layers."""
UP = LAYERS * 2 * EXPERTS
"""Of these, experts' `gate_proj` and `up_proj`."""
FORMATS = {
    "AWQ": f"{ALL - 1} as stored in u4",
    "GPTQ": f"{ALL - 1} as stored in i4",
    "GPTQ, act-order": f"{ALL - 1} as stored in u4",
    "compressed-tensors, int8": f"{ALL - 1} as stored in i8",
    "compressed-tensors, NVFP4": f"{ALL - 1} as stored in f4e2m1",
    "FP8, large blocks": f"{ALL - 1} as stored in f8e4m3",
    "FP8, blocks": f"{ALL - 1} decoded (groups of 24)",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """`write_pair` of a model with experts. Tests that get the same arguments share the files."""

    @cache
    def write(name: str, *args):
        return checkpoints.write_pair(tmp_path_factory.mktemp("pair"), "qwen3 moe", name, *args)

    return write


def blocks(model) -> list[SparseMoE]:
    return [layer.mlp for layer in model.model.layers]


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_logits(pair, name):
    quantized, plain = pair(name)
    kernels = TorchKernels()
    model, summary = held(open_written(quantized), kernels.kernels)
    assert summary == FORMATS[name]
    expected = decoded(open_written(plain))
    for counts in ((1,), (3, 5), (FEW_ROWS + 2,)):
        kernels.launches.clear()
        torch.testing.assert_close(logits(model, *counts), logits(expected, *counts), **CLOSE)
        # One for gate_proj and up_proj, and one for down_proj.
        assert kernels.launches.count("grouped") == (2 * LAYERS if "as stored" in summary else 0)


@torch.inference_mode()
def test_experts_as_stored_never_wait_for_the_device(pair):
    """So CUDA graphs contain them, whatever torch's own grouped product does."""
    quantized, plain = (open_written(folder) for folder in pair("GPTQ"))
    assert held(quantized, TorchKernels().kernels)[0].graphs
    assert not decoded(plain).graphs


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("AWQ", f"{ALL - 1} as stored in u4"),
        ("compressed-tensors, int8", f"{ALL - 1} as stored in i8"),
        (
            "GPTQ, act-order",
            f"{UP + 5} as stored in u4, {LAYERS * (EXPERTS + 1)} decoded (its groups are of inputs of several ranks)",
        ),
    ],
)
@torch.inference_mode()
def test_every_rank_computes_its_slice_of_every_expert(pair, name, summary, rank):
    quantized, plain = pair(name)
    model, found = held(open_written(quantized), TorchKernels().kernels, Rank(rank))
    assert found == summary
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([2, 2, 8, 9], dtype=torch.int32)
    for one, other in zip(blocks(model), blocks(decoded(open_written(plain), Rank(rank))), strict=True):
        assert other.experts.down_proj.weight.shape == (EXPERTS, 64, 32 // 2)
        torch.testing.assert_close(one.experts(x, ends), other.experts(x, ends), **CLOSE)


@pytest.mark.parametrize(
    ("excluded", "summary"),
    [
        (["layers.1.mlp.experts.3.up_proj"], f"{ALL - 2 * EXPERTS} as stored in i4, {2 * EXPERTS - 1} decoded"),
        (["down_proj"], f"{ALL - LAYERS * EXPERTS} as stored in i4"),
        (["gate_proj", "up_proj", "down_proj"], f"{4 * LAYERS} as stored in i4"),
    ],
)
@torch.inference_mode()
def test_experts_of_which_some_are_plain(pair, excluded, summary):
    quantized, plain = pair("GPTQ", tuple(excluded))
    model, found = held(open_written(quantized), TorchKernels().kernels)
    assert found.partition(" (")[0] == summary
    assert ("experts of different kinds" in found) == ("decoded" in summary)
    torch.testing.assert_close(logits(model, 3), logits(decoded(open_written(plain)), 3), **CLOSE)


@pytest.mark.parametrize(
    ("up", "summary"),
    [
        ("Q4_K", f"{UP} as stored in u4, {UP // 2} as stored in i8"),
        ("Q4_0", f"{UP} as stored in u4, {UP // 2} as stored in i8"),
        ("Q5_K", f"{UP} decoded (experts of different kinds), {UP // 2} as stored in i8"),
    ],
)
@torch.inference_mode()
def test_experts_of_a_gguf_file(tmp_path, up, summary):
    types = {"gate_proj": "Q4_K", "up_proj": up, "down_proj": "Q8_0"}
    quantized, plain = gguf_files.write_pair(tmp_path, "qwen3moe", types)
    model, found = held(open_written(quantized), TorchKernels().kernels)
    assert found == summary
    torch.testing.assert_close(logits(model, 3), logits(decoded(open_written(plain)), 3), **CLOSE)


class WrongKernels(TorchKernels):
    """Wrong for experts past the first, if these have many rows."""

    def _grouped(self, x, ends, experts):
        out = super()._grouped(x, ends, experts)
        out[20:] += 1
        return out


class CrashingKernels(TorchKernels):
    def _grouped(self, x, ends, experts):
        raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        (WrongKernels, "in a test, the grouped product with codes is off by"),
        (CrashingKernels, "no such instruction"),
    ],
)
@torch.inference_mode()
def test_experts_whose_kernel_fails_its_test_are_decoded(pair, kernels, reason):
    quantized, plain = pair("AWQ")
    model, summary = held(open_written(quantized), kernels().kernels)
    assert summary.startswith(f"{3 * LAYERS * EXPERTS} decoded ({reason}")
    assert f"{4 * LAYERS - 1} as stored in u4" in summary
    torch.testing.assert_close(logits(model, 3), logits(decoded(open_written(plain)), 3), **CLOSE)


@pytest.mark.parametrize(("name", "kind"), [("AWQ", "u4"), ("FP8, large blocks", "f8e4m3")])
@torch.inference_mode()
def test_random_matrices(tmp_path, name, kind):
    checkpoint, _ = (open_written(each) for each in checkpoints.write_pair(tmp_path, "qwen3 moe", name))
    config = RunnerConfig("cpu", weights="random")
    model, summary = held(checkpoint, TorchKernels().kernels, config=config)
    assert summary == f"{ALL} as stored in {kind}"
    assert logits(model, 5).isfinite().all()


@pytest.mark.parametrize(
    ("quantize", "summary"),
    [
        ("int8", f"{ALL + 2} as stored in i8"),
        ("int4", f"{UP + LAYERS} as stored in u4, {(EXPERTS + 3) * LAYERS + 2} as stored in i8"),
        ("fp8", f"{ALL + 2} as stored in f8e4m3"),
    ],
)
@torch.inference_mode()
def test_plain_experts_are_rounded_by_the_setting(pair, quantize, summary):
    _, folder = pair("AWQ")
    model, found = held(open_written(folder), TorchKernels().kernels, config=RunnerConfig("cpu", quantize=quantize))
    assert found == summary
    expected = decoded(open_written(folder))
    for name, target in expected.targets().items():
        if (rounding := rounding_of(quantize, name)) is not None:
            target.copy_(rounding(target).decode())
    torch.testing.assert_close(logits(model, 3), logits(expected, 3), **CLOSE)
