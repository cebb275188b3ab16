"""Tests the fused kernels on the device against the torch operations that they replace, then switches a model to them.

The number of rows is not a compile-time constant of any kernel, so the tests and the warm-up compile all variants that
serving needs.
"""

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.attention.backend import HeadShape, check_device, first_line
from engine_worker.layers.layer import FusedKernels, Layer
from engine_worker.layers.mlp import silu_and_mul
from engine_worker.layers.norm import rms_norm
from engine_worker.layers.rotary import Rope, Rotary, rotate
from engine_worker.layers.shard import Shard
from engine_worker.models.model import Model
from engine_worker.sampling.choose import TORCH, SamplingKernels
from engine_worker.sampling.filters import Filters, Thresholds, torch_thresholds
from engine_worker.sampling.noise import GumbelMax, torch_gumbel_max

COMPILERS = ("gcc", "clang")
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative to 1 + |expected|: a sum in a different order may be rounded the other way."""
NOISE_TOLERANCE = 1e-9
LIMITS = (((0, 40, 1, 3000), torch.int64), ((0.9, 1.0, 0.5), torch.float64), ((0.0, 0.1), torch.float32))
"""Values of top-k, top-p and min-p to test with, and their dtypes."""
ROWS = (1, 3, 70)
# Not multiples of the size of a kernel's part, so that the last part is partly filled.
VOCAB, LARGE_VOCAB = 3001, 40_001
THRESHOLD_SIZES = ((1, LARGE_VOCAB), (3, VOCAB), (70, VOCAB))
"""Rows and vocabularies to test thresholds with."""
EPS = 1e-6
OUTPUTS = 33
FEW_INPUTS, MANY_INPUTS = 1024, 2064
"""Input sizes for which there are separate kernels. Both are multiples of 16, as in nearly all models."""

Find = Callable[[torch.device], tuple[FusedKernels, SamplingKernels]]
"""Returns the kernels for a device; raises any exception if the device has no such kernels."""


class Fused(NamedTuple):
    """The outcome of `fuse`."""

    sampling: SamplingKernels
    summary: str
    """For the log."""


def missing_compiler() -> str | None:
    """The tools that Triton needs for compiling and cannot find, and how to install them, in one line; None if nothing
    is missing."""
    # Triton builds a small C extension before its first kernel.
    missing = []
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        missing.append(f"a C compiler ({', '.join(COMPILERS)} or the variable CC)")
    if not (_headers() / "Python.h").is_file():
        missing.append(f"Python's headers ({_headers()}/Python.h)")
    if not missing:
        return None
    return (
        f"Triton needs {' and '.join(missing)}: "
        "install gcc and python3-dev, or Sluice's kernels run only from a filled Triton cache"
    )


def triton_kernels(device: torch.device) -> tuple[FusedKernels, SamplingKernels]:
    """Triton's kernels; a `Find`."""
    if device.type != "cuda":
        raise ValueError("the device is a CPU")
    from engine_worker.layers.kernels import KERNELS
    from engine_worker.sampling.kernels import triton_gumbel_max
    from engine_worker.sampling.thresholds import triton_thresholds

    return KERNELS, SamplingKernels(triton_gumbel_max, triton_thresholds)


def no_kernels(device: torch.device) -> tuple[FusedKernels, SamplingKernels]:  # noqa: ARG001
    """A `Find` for fused_kernels = false."""
    raise ValueError("fused_kernels = false")


def fuse(
    model: Model, heads: HeadShape, dtype: torch.dtype, device: torch.device, shard: Shard, find: Find = triton_kernels
) -> Fused:
    """Switch the model to fused kernels if they pass their tests, on all ranks or on none. A model of transformers only
    gets the sampling kernels. `heads`: of this rank. Raises BrokenDeviceError if a kernel breaks the CUDA context."""
    layers = model if isinstance(model, Layer) else None
    reason = None
    try:
        kernels, sampling = find(device)
        verify_sampling(sampling, device)
        if layers is not None:
            verify_layers(kernels, model.config.hidden_size, heads, dtype, device)
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        check_device(device, "a fused Triton kernel", "fused_kernels = false", error)
        reason = first_line(error)
    if not shard.all_min(int(reason is None)):
        return Fused(TORCH, f"no: {reason or 'another rank cannot'}")
    if layers is None:
        return Fused(sampling, "sampling; the layers are transformers'")
    layers.fuse(kernels)
    return Fused(sampling, "layers and sampling")


def verify_layers(
    kernels: FusedKernels, hidden_size: int, heads: HeadShape, dtype: torch.dtype, device: torch.device
) -> None:
    """Test the layers' kernels for a model of this size. Raises ValueError if one does not agree with torch, and any
    exception of a kernel or its compiler."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rotated, head_dim = heads.num_heads + heads.num_kv_heads, heads.head_dim
    rotary = Rotary(Rope(10000.0), head_dim, dtype, device)
    weight, rows = (1 + 0.2 * random(*shape) for shape in ((hidden_size,), (rotated, head_dim)))
    for count in ROWS:
        x, update = random(count, hidden_size), random(count, hidden_size)
        compare("norm", kernels.norm(x, None, weight, EPS), rms_norm(x, weight, EPS))
        expected, found = x + update, x.clone()
        compare("norm of a sum", kernels.norm(found, update, weight, EPS), rms_norm(expected, weight, EPS))
        compare("sum", found, expected)
        x = random(count, rotated + heads.num_kv_heads, head_dim)[:, :rotated]
        rotations = rotary.rotations(torch.arange(7, 7 + count, device=device))
        compare("rotation", kernels.rotate(x, rotations, None, 0.0), rotate(x, rotations))
        expected = rotate(rms_norm(x, rows, EPS), rotations)
        compare("rotation of a norm", kernels.rotate(x, rotations, rows, EPS), expected)
        x = random(count, 2 * hidden_size)
        compare("gate", kernels.gate(x), silu_and_mul(x))
    for inputs in (min(hidden_size, FEW_INPUTS), MANY_INPUTS):
        x, weights = random(1, inputs), random(OUTPUTS, inputs) * inputs**-0.5
        compare("product", kernels.product(x, weights), F.linear(x, weights))


def verify_sampling(kernels: SamplingKernels, device: torch.device) -> None:
    """Test the sampling kernels. Raises as `verify_layers`."""
    verify_gumbel_max(kernels.gumbel_max, device)
    if kernels.thresholds is not None:
        verify_thresholds(kernels.thresholds, device)


def verify_thresholds(thresholds: Thresholds, device: torch.device) -> None:
    """Raises as `verify_layers`."""
    # With this seed no sum is so close to its top-p that rounding decides.
    generator = torch.Generator().manual_seed(9)
    for count, size in THRESHOLD_SIZES:
        scores = (4 * torch.randn(count, size, generator=generator)).to(device)
        scores[-1, ::2] = -torch.inf
        temperature = (0.5 + torch.rand(count, 1, generator=generator)).to(device)
        top_k, top_p, min_p = (
            torch.tensor([[values[i % len(values)]] for i in range(count)], dtype=dtype, device=device)
            for values, dtype in LIMITS
        )
        for filters in (Filters(top_k, top_p, min_p), Filters(top_k, None, None), Filters(0 * top_k, top_p, None)):
            (found, valid), (expected, _) = (
                one(scores, temperature, filters) for one in (thresholds, torch_thresholds)
            )
            scaled = scores / temperature
            if not valid.all() or not torch.equal(scaled >= found, scaled >= expected):
                raise ValueError("in a test, other tokens passed top-k, top-p and min-p")
    if thresholds(torch.full_like(scores, torch.nan), temperature, filters)[1].any():
        raise ValueError("in a test, a row without a finite score was reported as valid")


def verify_gumbel_max(gumbel_max: GumbelMax, device: torch.device) -> None:
    """Raises as `verify_layers`."""
    generator = torch.Generator().manual_seed(0)
    for count in ROWS:
        scores = (4 * torch.randn(count, VOCAB, generator=generator)).to(device)
        temperature = (0.5 + torch.rand(count, 1, generator=generator)).to(device)
        keys = torch.randint(-(1 << 63), (1 << 63) - 1, (count, 1), generator=generator).to(device)
        for threshold in (None, scores.amax(dim=1, keepdim=True) / temperature - 2.0):
            (sums, tokens), (others, expected) = (
                _winners(*one(scores, temperature, keys, threshold)) for one in (gumbel_max, torch_gumbel_max)
            )
            if not torch.equal(tokens, expected):
                raise ValueError("in a test, sampling chose other tokens")
            compare("noise", sums, others, NOISE_TOLERANCE)


def _winners(sums: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    peak, part = sums.max(dim=1, keepdim=True)
    return peak, tokens.gather(1, part)


def compare(what: str, found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Raises ValueError if they differ by more than rounding."""
    allowed = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    error = float(((found.double() - expected.double()).abs() / (1 + expected.double().abs())).max())
    # Not `error > allowed`: a NaN must fail too.
    if not error <= allowed:
        raise ValueError(f"in a test, the {what} is off by {error:.2g}")


def _headers() -> Path:
    # Where Triton looks: Debian's own scheme for `pip install`, posix_local, has no headers.
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
