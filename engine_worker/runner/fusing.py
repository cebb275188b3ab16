"""Tests the fused kernels on the device against the torch operations that they replace, and switches a model to them.

The number of rows is not a compile-time constant of any kernel, so these tests and the warm-up compile all variants
that serving needs.
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
from engine_worker.sampling.noise import GumbelMax, torch_gumbel_max

COMPILERS = ("gcc", "clang")
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative to 1 + |expected|: a sum in another order may round the other way."""
NOISE_TOLERANCE = 1e-9
ROWS = (1, 3, 70)
# Not a multiple of a kernel's part, so that the last one is partly filled.
VOCAB = 3001
EPS = 1e-6
OUTPUTS = 33
FEW_INPUTS, MANY_INPUTS = 1024, 2064
"""Both multiples of 16, as in nearly all models."""

Find = Callable[[torch.device], tuple[FusedKernels, GumbelMax]]
"""Raises any exception if there are none for the device."""


class Fused(NamedTuple):
    """What a model and its sampler use from now on."""

    gumbel_max: GumbelMax
    summary: str
    """For the log."""


def missing_compiler() -> str | None:
    """What Triton needs to compile but does not find, with the remedy, in one line; None if it has everything."""
    # Triton builds a small C extension before its first kernel.
    absent = []
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        absent.append(f"a C compiler ({', '.join(COMPILERS)} or the variable CC)")
    if not (_headers() / "Python.h").is_file():
        absent.append(f"Python's headers ({_headers()}/Python.h)")
    if not absent:
        return None
    return (
        f"Triton needs {' and '.join(absent)}: "
        "install gcc and python3-dev, or Sluice's kernels run only from a filled Triton cache"
    )


def by_triton(device: torch.device) -> tuple[FusedKernels, GumbelMax]:
    if device.type != "cuda":
        raise ValueError("the device is a CPU")
    from engine_worker.layers.kernels import KERNELS
    from engine_worker.sampling.kernels import triton_gumbel_max

    return KERNELS, triton_gumbel_max


def none(device: torch.device) -> tuple[FusedKernels, GumbelMax]:  # noqa: ARG001
    raise ValueError("fused_kernels = false")


def fuse(
    model: Model, heads: HeadShape, dtype: torch.dtype, device: torch.device, shard: Shard, find: Find = by_triton
) -> Fused:
    """Switch the model to fused kernels if they pass their tests, on all ranks or on none. A model of transformers gets
    the sampling kernel only. `heads`: this rank's. Raises BrokenDeviceError if a kernel breaks the CUDA context."""
    layers = model if isinstance(model, Layer) else None
    reason = None
    try:
        kernels, gumbel_max = find(device)
        verify_gumbel_max(gumbel_max, device)
        if layers is not None:
            verify_layers(kernels, model.config.hidden_size, heads, dtype, device)
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        check_device(device, "a fused Triton kernel", "fused_kernels = false", error)
        reason = first_line(error)
    if not shard.all_min(int(reason is None)):
        return Fused(torch_gumbel_max, f"no: {reason or 'another rank cannot'}")
    if layers is None:
        return Fused(gumbel_max, "sampling; the layers are transformers'")
    layers.fuse(kernels)
    return Fused(gumbel_max, "layers and sampling")


def verify_layers(
    kernels: FusedKernels, hidden_size: int, heads: HeadShape, dtype: torch.dtype, device: torch.device
) -> None:
    """For a model of this size. Raises ValueError if a kernel does not agree with torch, and anything it raises."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rotated, head_dim = heads.num_heads + heads.num_kv_heads, heads.head_dim
    rotary = Rotary(Rope(10000.0), head_dim, dtype, device)
    weight, rows = (1 + 0.2 * some(*shape) for shape in ((hidden_size,), (rotated, head_dim)))
    for count in ROWS:
        x, update = some(count, hidden_size), some(count, hidden_size)
        _compare("norm", kernels.norm(x, None, weight, EPS), rms_norm(x, weight, EPS))
        expected, found = x + update, x.clone()
        _compare("norm of a sum", kernels.norm(found, update, weight, EPS), rms_norm(expected, weight, EPS))
        _compare("sum", found, expected)
        x = some(count, rotated + heads.num_kv_heads, head_dim)[:, :rotated]
        rotations = rotary.rotations(torch.arange(7, 7 + count, device=device))
        _compare("rotation", kernels.rotate(x, rotations, None, 0.0), rotate(x, rotations))
        expected = rotate(rms_norm(x, rows, EPS), rotations)
        _compare("rotation of a norm", kernels.rotate(x, rotations, rows, EPS), expected)
        x = some(count, 2 * hidden_size)
        _compare("gate", kernels.gate(x), silu_and_mul(x))
    # Few inputs and many, of which each has a kernel of its own.
    for inputs in (min(hidden_size, FEW_INPUTS), MANY_INPUTS):
        x, weights = some(1, inputs), some(OUTPUTS, inputs) * inputs**-0.5
        _compare("product", kernels.product(x, weights), F.linear(x, weights))


def verify_gumbel_max(gumbel_max: GumbelMax, device: torch.device) -> None:
    """Raises ValueError if it does not agree with torch's, and anything it raises."""
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
                raise ValueError("in a test, sampling drew other tokens")
            _compare("noise", sums, others, NOISE_TOLERANCE)


def _winners(sums: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    peak, part = sums.max(dim=1, keepdim=True)
    return peak, tokens.gather(1, part)


def _compare(what: str, found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    allowed = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    error = float(((found.double() - expected.double()).abs() / (1 + expected.double().abs())).max())
    # Not `error > allowed`: a NaN must fail too.
    if not error <= allowed:
        raise ValueError(f"in a test, the {what} is off by {error:.2g}")


def _headers() -> Path:
    # Where Triton looks: Debian's own scheme for `pip install`, posix_local, has no headers.
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
