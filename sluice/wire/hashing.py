"""Chained hashes of KV blocks, which are the same in every process."""

import sys
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

DIGEST_BYTES = 16


class Domain(NamedTuple):
    """Values in addition to the weights that must be equal for prefixes to be shared; see `root_hash`."""

    salt: str = ""
    adapter: str = ""
    """Version of the LoRA adapter."""


def root_hash(fingerprint: str, salt: str = "", adapter: str = "") -> bytes:
    """Root of a block chain: prefixes are shared only within one (weights, salt, adapter) domain."""
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"sluice-root")
    for part in (fingerprint, salt, adapter):
        # Each part is preceded by its length. Otherwise different parts could yield the same bytes.
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def block_hash(parent: bytes, tokens: Sequence[int], key: bytes = b"") -> bytes:
    """Hash of one full block.

    `parent`: hash of the preceding block, or the root. `key`: what the block depends on in addition to its tokens and
    parent, see `VirtualTokens.key`.
    """
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return blake2b(parent + packed.tobytes() + key, digest_size=DIGEST_BYTES, person=b"sluice-block").digest()


def block_chain(
    root: bytes,
    tokens: Sequence[int],
    tokens_per_block: int,
    key: Callable[[int, Sequence[int]], bytes] | None = None,
) -> list[bytes]:
    """Hashes of the full blocks of `tokens`, first block first.

    `key`: called with the position of a block's first token and the block's tokens, see `block_hash`.
    """
    chain: list[bytes] = []
    parent = root
    for end in range(tokens_per_block, len(tokens) + 1, tokens_per_block):
        block = tokens[end - tokens_per_block : end]
        parent = block_hash(parent, block, b"" if key is None else key(end - tokens_per_block, block))
        chain.append(parent)
    return chain


def short_hash(block: bytes) -> int:
    """Id of a block in cache reports: the first eight bytes of its hash."""
    # Eight bytes are enough: after a collision a router may choose a worse engine, but engines compare whole hashes.
    return int.from_bytes(block[:8], "big")
