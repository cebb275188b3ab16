"""Which of a sequence's tokens are in the cache: by hash chain of full blocks, or with a sequence of its request."""

from typing import NamedTuple

from engine_worker.kvcache.geometry import Geometry
from engine_worker.kvcache.tiers import Tiers
from engine_worker.request import Content, Sequence, State
from sluice.ring.hashing import block_hash

NOWHERE = 0
"""Entry of a block table that nobody reads: any block will do."""


class Prefix(NamedTuple):
    """The part of a sequence that need not be computed."""

    blocks: list[int]
    """The beginning of its block table."""
    first_block: int
    """Entries before this one lie behind the attention window: nobody reads them."""
    num_computed: int
    on_host: list[tuple[int, int]]
    """(index in the table, host block) of the blocks that have to be loaded; their entries mean nothing yet."""
    copy_from: int | None = None
    """Block whose first part is the last of the computed tokens: to be copied, for the sequence will write the rest."""

    @property
    def held(self) -> list[int]:
        """The device blocks that the sequence will hold for this; the one to be copied is not among them."""
        loaded = {index for index, _ in self.on_host}
        entries = enumerate(self.blocks[self.first_block :], self.first_block)
        return [block for index, block in entries if index not in loaded] if loaded else self.blocks[self.first_block :]


class PrefixFinder:
    """Publishes computed blocks and finds them again.

    Only full blocks are found, and never a sequence's last token, which has to be computed again to have logits. A
    block's tokens are compared beside its hash, so a collision is a miss. With an attention window the blocks of the
    last one are enough.
    """

    def __init__(self, tiers: Tiers, geometry: Geometry, reuse: bool) -> None:
        self.reuse = reuse
        self._tiers = tiers
        self._geometry = geometry

    def find(self, sequence: Sequence) -> Prefix:
        """The longest prefix of a sequence that holds no memory. Nothing is held by this."""
        size, num_prompt = self._geometry.tokens_per_block, sequence.request.num_prompt
        source = self._fork_source(sequence)
        if source is not None and not sequence.chain:
            sequence.chain = source.chain[: num_prompt // size]
        matched = self._collect(sequence, self._worthwhile(sequence))
        if source is not None and num_prompt > matched.num_computed:
            return self._fork(source, num_prompt)
        return matched

    def publish(self, sequence: Sequence, indexes: range) -> None:
        """These blocks of its table are full and computed: they can be found from now on."""
        if self.reuse:
            for index in indexes:
                self._tiers.publish(sequence.blocks[index], self._content(sequence, index))

    def next_block(self, sequence: Sequence, num_computed: int) -> bytes | None:
        """Hash of the full block that a sequence with so many tokens computed does next; None where it fills none."""
        index = num_computed // self._geometry.tokens_per_block
        full = (index + 1) * self._geometry.tokens_per_block <= sequence.num_known
        return self._content(sequence, index).hash if self.reuse and full else None

    def missing(self, sequence: Sequence, prefix: Prefix) -> bytes | None:
        """Hash of the first block after its prefix that the sequence could use, were it in the cache; None: none."""
        index = len(prefix.blocks)
        return self._content(sequence, index).hash if index < self.usable_blocks(sequence.num_tokens) else None

    def usable_blocks(self, num_tokens: int) -> int:
        """Full blocks that a sequence of so many tokens could use, were they in the cache."""
        return (num_tokens - 1) // self._geometry.tokens_per_block if self.reuse else 0

    def _worthwhile(self, sequence: Sequence) -> range:
        """The blocks to look for: all that are usable, or the last window after which the sequence can go on."""
        usable = self.usable_blocks(sequence.num_tokens)
        if self._geometry.window is None:
            return range(usable)
        first_needed, size = self._geometry.first_needed, self._geometry.tokens_per_block
        start = end = usable
        while start > first_needed(end * size):
            start -= 1
            if not self._tiers.holds(self._content(sequence, start)):
                end = start
        return range(first_needed(end * size), end)

    def _collect(self, sequence: Sequence, indexes: range) -> Prefix:
        """These blocks, as far as all are in the cache."""
        device, host = self._tiers.device, self._tiers.host
        blocks, on_host = [NOWHERE] * indexes.start, []
        for index in indexes:
            content = self._content(sequence, index)
            block = device.find(content)
            if block is None:
                source = host.find(content)
                if source is None:
                    break
                on_host.append((index, source))
                block = NOWHERE
            blocks.append(block)
        return Prefix(blocks, indexes.start, len(blocks) * self._geometry.tokens_per_block, on_host)

    def _fork(self, source: Sequence, num_prompt: int) -> Prefix:
        whole, rest = divmod(num_prompt, self._geometry.tokens_per_block)
        first = self._geometry.first_needed(num_prompt)
        blocks = [NOWHERE] * first + source.blocks[first:whole]
        return Prefix(blocks, first, num_prompt, [], source.blocks[whole] if rest else None)

    def _fork_source(self, sequence: Sequence) -> Sequence | None:
        """A sequence of the same request that holds what is needed of the prompt, if this one goes beyond it.

        None that has ended: where its step failed, its blocks may never have got what they should hold.
        """
        request = sequence.request
        if not sequence.output or len(request.sequences) == 1:
            return None
        first = self._geometry.first_needed(request.num_prompt)
        for other in request.sequences:
            holds = other.blocks and other.num_computed >= request.num_prompt and other.first_block <= first
            if holds and other.state is not State.ENDED:
                return other
        return None

    def _content(self, sequence: Sequence, index: int) -> Content:
        """What the sequence's full block `index` holds; extends its chain as far as that."""
        size, chain = self._geometry.tokens_per_block, sequence.chain
        while len(chain) <= index:
            start = len(chain) * size
            tokens = tuple(sequence.tokens_between(start, start + size))
            parent = chain[-1].hash if chain else sequence.request.root
            chain.append(Content(block_hash(parent, tokens), tokens))
        return chain[index]
