"""Kernels that do at once what torch does in several launches: whether this machine gets them, and why not.

They are tried out here, on the device, against what they stand for. Whatever of them depends on the number of rows is
no part of what is compiled, so the trial and a step of warming up have compiled all that serving will ask for.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.attention.backend import HeadShape
from engine_worker.attention.refusal import check_device, in_a_line
from engine_worker.layers.fusion import Kernels
from engine_worker.layers.layer import Layer
from engine_worker.layers.mlp import gated
from engine_worker.layers.norm import normed
from engine_worker.layers.rotary import Rope, Rotary, rotate
from engine_worker.layers.shard import Shard
from engine_worker.models.model import Model
from engine_worker.sampling.gumbel_max import Race, by_torch

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of numbers about one, some of them ten, that round the other way where a sum does."""
NOISE_TOLERANCE = 1e-9
ROWS = (1, 3, 70)
VOCAB = 3001
EPS = 1e-6

Find = Callable[[torch.device], tuple[Kernels, Race]]
"""Raises what it raises where there are none for the device."""


class Fused(NamedTuple):
    """What came of it."""

    race: Race
    said: str
    """For the log."""


def by_triton(device: torch.device) -> tuple[Kernels, Race]:
    """Sluice's own."""
    if device.type != "cuda":
        raise ValueError("the device is a CPU")
    from engine_worker.layers.kernels import KERNELS
    from engine_worker.sampling.kernels import race

    return KERNELS, race


def none(device: torch.device) -> tuple[Kernels, Race]:  # noqa: ARG001
    """Torch's operations, as fused_kernels = false asks for. Raises ValueError."""
    raise ValueError("fused_kernels = false")


def fuse(
    model: Model, heads: HeadShape, dtype: torch.dtype, device: torch.device, shard: Shard, find: Find = by_triton
) -> Fused:
    """Have the model compute by kernels where it is made of our layers and they are right, on all ranks or on none.
    `heads`: this rank's. Raises BrokenDeviceError where one takes the CUDA context with it."""
    layers = model if isinstance(model, Layer) else None
    refused = None
    try:
        kernels, race = find(device)
        try_race(race, device)
        if layers is not None:
            try_layers(kernels, model.config.hidden_size, heads, dtype, device)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises is why its kernels are not used
        check_device(device, "a fused Triton kernel", "fused_kernels = false", error)
        refused = in_a_line(error)
    if not shard.least(int(refused is None)):
        return Fused(by_torch, f"no: {refused or 'another rank cannot'}")
    if layers is None:
        return Fused(race, "sampling; the layers are transformers'")
    layers.fuse(kernels)
    return Fused(race, "layers and sampling")


def try_layers(kernels: Kernels, hidden_size: int, heads: HeadShape, dtype: torch.dtype, device: torch.device) -> None:
    """Of a model of this size. Raises ValueError where one does not agree with torch, and whatever it raises."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    turned, head_dim = heads.num_heads + heads.num_kv_heads, heads.head_dim
    rotary = Rotary(Rope(10000.0), head_dim, dtype, device)
    weight, rows = (1 + 0.2 * some(*shape) for shape in ((hidden_size,), (turned, head_dim)))
    for count in ROWS:
        x, update = some(count, hidden_size), some(count, hidden_size)
        _compare("norm", kernels.norm(x, None, weight, EPS), normed(x, weight, EPS))
        expected, found = x + update, x.clone()
        _compare("norm of a sum", kernels.norm(found, update, weight, EPS), normed(expected, weight, EPS))
        _compare("sum", found, expected)
        x = some(count, turned + heads.num_kv_heads, head_dim)[:, :turned]
        rotations = rotary.rotations(torch.arange(7, 7 + count, device=device))
        _compare("rotation", kernels.turn(x, rotations, None, 0.0), rotate(x, rotations))
        expected = rotate(normed(x, rows, EPS), rotations)
        _compare("rotation of a norm", kernels.turn(x, rotations, rows, EPS), expected)
        x = some(count, 2 * hidden_size)
        _compare("gate", kernels.gate(x), gated(x))


def try_race(race: Race, device: torch.device) -> None:
    """Raises as `try_layers` does."""
    generator = torch.Generator().manual_seed(0)
    for count in ROWS:
        scores = (4 * torch.randn(count, VOCAB, generator=generator)).to(device)
        temperature = (0.5 + torch.rand(count, 1, generator=generator)).to(device)
        keys = torch.randint(-(1 << 63), (1 << 63) - 1, (count, 1), generator=generator).to(device)
        for threshold in (None, scores.amax(dim=1, keepdim=True) / temperature - 2.0):
            (sums, tokens), (others, expected) = (
                _winners(*one(scores, temperature, keys, threshold)) for one in (race, by_torch)
            )
            if not torch.equal(tokens, expected):
                raise ValueError("tried out, sampling takes other tokens")
            _compare("noise", sums, others, NOISE_TOLERANCE)


def _winners(sums: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    peak, part = sums.max(dim=1, keepdim=True)
    return peak, tokens.gather(1, part)


def _compare(what: str, found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    allowed = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    error = float(((found.double() - expected.double()).abs() / (1 + expected.double().abs())).max())
    # So that not-a-number fails too.
    if not error <= allowed:
        raise ValueError(f"tried out, the {what} is wrong by {error:.2g}")
