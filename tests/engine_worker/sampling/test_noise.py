import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.sampling.noise import BITS, gumbel, noise_key, random_bits
from sluice.wire.params import derive_seed

MASK = (1 << 64) - 1


def splitmix64(seed: int, index: int) -> int:
    """The index-th output, as in the paper's reference code."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_splitmix64_agrees_with_published_values():
    assert [splitmix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 20))
def test_a_tokens_bits_are_the_upper_bits_of_its_output(key, token):
    bits = random_bits(torch.tensor([key]), torch.tensor([token])).item()
    assert bits == splitmix64(key & MASK, token) >> (64 - BITS)


@given(st.integers(0, MASK), st.integers(0, 64), st.integers(0, 1 << 20))
def test_a_sequence_has_the_noise_of_a_request_with_its_seed(seed, sequence, position):
    assert noise_key(seed, sequence, position) == noise_key(derive_seed(seed, sequence), 0, position)


def test_keys_do_not_collide():
    keys = {noise_key(seed, sequence, at) for seed in range(20) for sequence in range(8) for at in range(100)}
    assert len(keys) == 20 * 8 * 100


def test_gumbel():
    bits = torch.tensor([0, 1, 12345, (1 << BITS) - 1])
    expected = [-math.log(-math.log((b + 0.5) / 2**BITS)) for b in bits.tolist()]
    assert gumbel(bits).tolist() == pytest.approx(expected, rel=1e-9)
    assert -3.1 < gumbel(bits).min() < gumbel(bits).max() < 22.2


def test_noise_has_the_moments_of_gumbel():
    keys = torch.tensor([[noise_key(1, 0, position)] for position in range(64)])
    noise = gumbel(random_bits(keys, torch.arange(4096)))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    neighbours = torch.corrcoef(torch.stack((noise[:-1].flatten(), noise[1:].flatten())))[0, 1]
    assert abs(neighbours) < 0.01
