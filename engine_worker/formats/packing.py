"""Numbers of few bits, packed into bytes or 32-bit words."""

import torch
from torch import Tensor

WORD_BITS = 32


def pack_pairs(codes: Tensor) -> Tensor:
    """[..., K] integers, of which the low four bits count -> [..., K / 2] uint8, the first of each pair in the low
    bits."""
    codes = codes.to(torch.uint8) & 15
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def swap_pairs(packed: Tensor) -> Tensor:
    """The other code of each pair first. uint8, any shape."""
    return (packed >> 4) | (packed << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    """[..., K / 2] uint8 -> [..., K] uint8 in [0, 15]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def words_of(count: int, bits: int, padded: bool) -> int:
    """Number of words for `count` numbers; see `unpack_words`."""
    return -(-count // (WORD_BITS // bits)) if padded else -(-count * bits // WORD_BITS)


def unpack_words(words: Tensor, bits: int, count: int, padded: bool = False) -> Tensor:
    """[..., W] int32, read as one stream of `bits`-bit numbers with the lowest bits first -> [..., count] uint8.
    padded: no number crosses two words; bits that are too few for one more number are not used."""
    mask = (1 << bits) - 1
    if padded or WORD_BITS % bits == 0:
        shifts = torch.arange(WORD_BITS // bits, dtype=torch.int32) * bits
        # The shift is arithmetic: the mask removes the copies of the sign.
        return ((words.unsqueeze(-1) >> shifts) & mask).to(torch.uint8).flatten(-2)[..., :count]
    stream = words.to(torch.int64) & 0xFFFFFFFF
    starts = torch.arange(count) * bits
    word, shift = starts // WORD_BITS, starts % WORD_BITS
    next_words = torch.nn.functional.pad(stream, (0, 1))[..., word + 1]
    return (((stream[..., word] | next_words << WORD_BITS) >> shift) & mask).to(torch.uint8)
