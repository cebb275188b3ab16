"""Numbers of few bits, packed into bytes or 32-bit words."""

import torch
import torch.nn.functional as F
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
    whole = padded or WORD_BITS % bits == 0
    # How many words have how many numbers until the places of the numbers repeat.
    length, numbers = (1, WORD_BITS // bits) if whole else (bits, WORD_BITS)
    words = F.pad(words, (0, -words.shape[-1] % length))
    words = words.reshape(*words.shape[:-1], -1, length)
    unpacked = torch.empty(*words.shape[:-1], numbers, dtype=torch.uint8)
    # One number of each word at a time: all in four or eight bytes each would be many times the matrix.
    for index in range(numbers):
        word, shift = divmod(index * bits, WORD_BITS)
        # The shift is arithmetic: masks remove the copies of the sign.
        number, found = words[..., word] >> shift, WORD_BITS - shift
        if found < bits:
            number = (number & ((1 << found) - 1)) | (words[..., word + 1] << found)
        unpacked[..., index] = number & ((1 << bits) - 1)
    return unpacked.flatten(-2)[..., :count]
