"""Gumbel noise that is a pure function of (seed, sequence, position, token id).

Adding independent Gumbel noise to log-probabilities and taking the maximum samples from the distribution (Gumbel 1954,
"Gumbel-max"). Counter-based noise makes the sample independent of batch, chunking, preemption and machine: each pair of
seed and sequence is a seed of SplitMix64 (Steele et al. 2014), whose position-th output seeds another, whose (token
id)-th output is the token's randomness.
"""

from torch import Tensor

from sluice.ring.params import derive_seed

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

BITS = 31
"""Of a token's randomness: u = (bits + 1/2) / 2**31 is exact in float64."""


def noise_key(seed: int, sequence: int, position: int) -> int:
    """Key of one draw, as a signed 64-bit integer."""
    return _signed(_mix_int(_mix_int(derive_seed(seed, sequence)) + (position + 1) * GOLDEN))


def random_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Int64 keys and token ids, broadcast -> int64 in 0 to 2**31 - 1.

    SplitMix64's finalizer in wrapping int64 arithmetic. Its last xor-shift leaves the upper 31 bits, which are taken,
    as they are.
    """
    x = (token_ids + 1) * _signed(GOLDEN) + keys
    x.bitwise_xor_(_shifted(x, 30)).mul_(_signed(FACTORS[0]))
    x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(FACTORS[1]))
    return _shifted(x, 64 - BITS)


def gumbel(bits: Tensor) -> Tensor:
    """Random bits -> float64 noise, -log(-log(u)). The two logarithms are good to 1e-15, so machines agree on the
    winner."""
    return bits.double().add_(0.5).mul_(2.0**-BITS).log_().neg_().log_().neg_()


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64, which torch shifts arithmetically."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mix_int(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * FACTORS[0]) & MASK
    x = ((x ^ (x >> 27)) * FACTORS[1]) & MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    x &= MASK
    return x - (1 << 64) if x >> 63 else x
