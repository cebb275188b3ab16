"""Which blocks belong to long prefixes."""

from collections.abc import Iterator, Mapping

Parents = Mapping[bytes, bytes | None]
"""For each block the hash of the one before it; None for the first of a prefix."""


def long_chains(parents: Parents, least: int) -> Iterator[list[bytes]]:
    """The chains of at least `least` blocks that are whole, each from its first block to one that no other follows."""
    depths = _depths(parents)
    followed = {parents[digest] for digest in depths}
    for digest, depth in depths.items():
        if depth >= least and digest not in followed:
            chain = list[bytes]()
            at: bytes | None = digest
            while at is not None:
                chain.append(at)
                at = parents[at]
            yield chain[::-1]


def _depths(parents: Parents) -> dict[bytes, int]:
    """Number of blocks of the prefix that ends with a block, without blocks whose prefix is not whole."""
    depths: dict[bytes, int | None] = {}
    for digest in parents:
        path = list[bytes]()
        at: bytes | None = digest
        while at is not None and at in parents and at not in depths:
            # None until its prefix is known, so that a circle of damaged entries ends here.
            depths[at] = None
            path.append(at)
            at = parents[at]
        depth = 0 if at is None else depths.get(at)
        for block in reversed(path):
            depth = None if depth is None else depth + 1
            depths[block] = depth
    return {digest: depth for digest, depth in depths.items() if depth is not None}
