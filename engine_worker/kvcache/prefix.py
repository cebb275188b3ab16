"""Which of a sequence's tokens are in the cache: by hash chain of full blocks, or with a sequence of its request."""

from typing import NamedTuple

from engine_worker.kvcache.pool import BlockPool, Content
from engine_worker.request import Sequence
from sluice.ring.hashing import block_hash


class Prefix(NamedTuple):
    """The part of a sequence that need not be computed."""

    blocks: list[int]
    num_computed: int
    copy_from: int | None = None
    """Block whose first part is the last of the computed tokens: to be copied, for the sequence will write the rest."""

    @property
    def held(self) -> list[int]:
        """The blocks that the sequence has to hold for this."""
        return self.blocks if self.copy_from is None else [*self.blocks, self.copy_from]


class PrefixFinder:
    """Publishes computed blocks and finds them again.

    Only full blocks are found, and never a sequence's last token, which has to be computed again to have logits. A
    block's tokens are compared beside its hash, so a collision is a miss.
    """

    def __init__(self, pool: BlockPool, tokens_per_block: int, reuse: bool) -> None:
        self._pool = pool
        self._tokens_per_block = tokens_per_block
        self._reuse = reuse

    def find(self, sequence: Sequence) -> Prefix:
        """The longest prefix of a sequence that holds no memory. Nothing is held by this."""
        size, num_prompt = self._tokens_per_block, sequence.request.num_prompt
        source = self._fork_source(sequence)
        whole, rest = divmod(num_prompt, size)
        if source is not None and not sequence.chain:
            sequence.chain = source.chain[:whole]
        matched = self._match(sequence) if self._reuse else []
        if source is None or num_prompt <= len(matched) * size:
            return Prefix(matched, len(matched) * size)
        return Prefix(source.blocks[:whole], num_prompt, source.blocks[whole] if rest else None)

    def publish(self, sequence: Sequence, indexes: range) -> None:
        """These blocks of its table are full and computed: they can be found from now on."""
        if self._reuse:
            for index in indexes:
                self._pool.publish(sequence.blocks[index], self._content(sequence, index))

    def _match(self, sequence: Sequence) -> list[int]:
        found: list[int] = []
        for index in range((sequence.num_tokens - 1) // self._tokens_per_block):
            block = self._pool.find(self._content(sequence, index))
            if block is None:
                break
            found.append(block)
        return found

    def _fork_source(self, sequence: Sequence) -> Sequence | None:
        """A sequence of the same request that holds the whole prompt, if this one already goes beyond it."""
        request = sequence.request
        if not sequence.output or len(request.sequences) == 1:
            return None
        for other in request.sequences:
            if other.blocks and other.num_computed >= request.num_prompt and other.copy is None:
                return other
        return None

    def _content(self, sequence: Sequence, index: int) -> Content:
        """What the sequence's full block `index` holds; extends its hash chain as far as that."""
        size, chain = self._tokens_per_block, sequence.chain
        while len(chain) <= index:
            start = len(chain) * size
            parent = chain[-1] if chain else sequence.request.root
            chain.append(block_hash(parent, sequence.tokens_between(start, start + size)))
        return Content(chain[index], tuple(sequence.tokens_between(index * size, index * size + size)))
