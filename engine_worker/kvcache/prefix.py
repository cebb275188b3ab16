"""Finds the part of a sequence that is already computed: full blocks by their hash chain, or the blocks of a
sibling."""

from typing import NamedTuple

from engine_worker.kvcache.pool import Geometry
from engine_worker.kvcache.tiers import Tiers
from engine_worker.request import Sequence, State
from engine_worker.step import Content
from sluice.wire.hashing import block_hash

GENERATED = b"generated"
"""Begins the key of a block with generated tokens; the number of its prompt tokens follows."""
UNUSED = 0
"""Entry of a block table that is never read; any valid block number would do."""


class Prefix(NamedTuple):
    """The part of a sequence that need not be computed."""

    blocks: list[int]
    """The start of the sequence's block table."""
    first_block: int
    """Index of the first entry that is read; earlier entries are before the attention window."""
    num_computed: int
    on_host: list[tuple[int, int]]
    """(index in the table, host block) of the blocks to load; their entries in `blocks` are placeholders."""
    num_drafted: int = 0
    """Leading tokens that the draft model has computed, too."""
    copy_from: int | None = None
    """Partly filled block with the last computed tokens. It is copied, because the sequence fills the rest itself."""

    @property
    def held(self) -> list[int]:
        """The device blocks that the sequence will share."""
        loaded = {index for index, _ in self.on_host}
        entries = enumerate(self.blocks[self.first_block :], self.first_block)
        return [block for index, block in entries if index not in loaded] if loaded else self.blocks[self.first_block :]


class PrefixFinder:
    """Publishes computed blocks and finds them.

    Only full blocks are found, up to `Sequence.num_reusable`: tokens whose logits or tensors are needed, the last token
    among them, are computed again. With an attention window the blocks of the last window suffice.
    """

    def __init__(self, tiers: Tiers, geometry: Geometry, reuse: bool) -> None:
        self.reuse = reuse
        self._tiers = tiers
        self._geometry = geometry

    def find(self, sequence: Sequence) -> Prefix:
        """The longest cached prefix of a sequence that holds no memory. Does not hold the blocks."""
        size, num_prompt = self._geometry.tokens_per_block, sequence.request.num_prompt
        source = self._fork_source(sequence)
        if source is not None and not sequence.chain:
            # Siblings share the prompt, so its blocks need not be hashed again.
            sequence.chain = source.chain[: num_prompt // size]
        matched = self._collect(sequence, self._candidates(sequence, self.usable_blocks(sequence)))
        if sequence.request.recompute is not None and 0 < matched.num_computed == num_prompt - 1:
            # The prompt's last token, computed alone, would get the shape of a generated one, and other bits.
            matched = self._collect(sequence, self._candidates(sequence, len(matched.blocks) - 1))
        if source is not None and matched.num_computed < num_prompt <= sequence.num_reusable:
            return self.fork(source, num_prompt)
        return matched

    def publish(self, sequence: Sequence, indexes: range) -> None:
        """Make the full and computed blocks at these indexes of the sequence's table findable."""
        if not self.reuse:
            return
        for index in indexes:
            self._tiers.publish(sequence.blocks[index], self._content(sequence, index))

    def next_block(self, sequence: Sequence, num_computed: int) -> bytes | None:
        """Hash of the block that a sequence computes after `num_computed` tokens; None if it has too few known tokens
        to fill it."""
        index = num_computed // self._geometry.tokens_per_block
        full = (index + 1) * self._geometry.tokens_per_block <= sequence.num_known
        return self._content(sequence, index).hash if self.reuse and full else None

    def missing(self, sequence: Sequence, prefix: Prefix) -> bytes | None:
        """Hash of the first block after `prefix`; None if the sequence could not use it."""
        index = len(prefix.blocks)
        return self._content(sequence, index).hash if index < self.usable_blocks(sequence) else None

    def absent(self, sequence: Sequence) -> list[Content]:
        """The blocks that the sequence could use and that are not cached, in order. With a window, only those of the
        last one."""
        usable = self.usable_blocks(sequence)
        first = self._geometry.first_needed(usable * self._geometry.tokens_per_block)
        contents = [self._content(sequence, index) for index in range(first, usable)]
        return [content for content in contents if not self._tiers.holds(content)]

    def usable_blocks(self, sequence: Sequence) -> int:
        """Full blocks that the sequence could use if they were cached."""
        return sequence.num_reusable // self._geometry.tokens_per_block if self.reuse else 0

    def _candidates(self, sequence: Sequence, usable: int) -> range:
        """Indexes of the blocks to look up: the first `usable` ones or, with a window, those of the last fully cached
        window."""
        if self._geometry.window is None:
            return range(usable)
        first_needed, size = self._geometry.first_needed, self._geometry.tokens_per_block
        # From the last block backwards: the window has to end before each block that is not cached.
        start = end = usable
        while start > first_needed(end * size):
            start -= 1
            if not self._tiers.holds(self._content(sequence, start)):
                end = start
        return range(first_needed(end * size), end)

    def _collect(self, sequence: Sequence, indexes: range) -> Prefix:
        """The blocks at these indexes, up to the first one that is not cached."""
        device, host = self._tiers.device, self._tiers.host
        blocks, on_host = [UNUSED] * indexes.start, []
        # Blocks before the window count as drafted: the draft model does not read them either.
        drafted = indexes.start
        for index in indexes:
            content = self._content(sequence, index)
            block = device.find(content)
            if block is None:
                source = host.find(content)
                if source is None:
                    break
                on_host.append((index, source))
                drafted += drafted == index and host.is_drafted(source)
                block = UNUSED
            else:
                drafted += drafted == index and device.is_drafted(block)
            blocks.append(block)
        size = self._geometry.tokens_per_block
        return Prefix(blocks, indexes.start, len(blocks) * size, on_host, drafted * size)

    def fork(self, source: Sequence, num_tokens: int) -> Prefix:
        """A prefix of the first `num_tokens` tokens of `source`, a holder that has computed them."""
        whole, rest = divmod(num_tokens, self._geometry.tokens_per_block)
        first = self._geometry.first_needed(num_tokens)
        blocks = [UNUSED] * first + source.blocks[first:whole]
        drafted = min(source.num_draft_computed, num_tokens)
        return Prefix(blocks, first, num_tokens, [], drafted, source.blocks[whole] if rest else None)

    def _fork_source(self, sequence: Sequence) -> Sequence | None:
        """A sibling that holds the part of the prompt that this sequence attends to; None if this one has no output."""
        request = sequence.request
        if not sequence.output or len(request.sequences) == 1:
            return None
        first = self._geometry.first_needed(request.num_prompt)
        for sibling in request.sequences:
            holds = sibling.blocks and sibling.num_computed >= request.num_prompt and sibling.first_block <= first
            # After a failed step the blocks of ended sequences may lack content.
            if holds and sibling.state is not State.ENDED:
                return sibling
        return None

    def _content(self, sequence: Sequence, index: int) -> Content:
        """Content of the sequence's full block `index`."""
        size, chain = self._geometry.tokens_per_block, sequence.chain
        while len(chain) <= index:
            start = len(chain) * size
            tokens = tuple(sequence.tokens_between(start, start + size))
            request = sequence.request
            key = b"" if request.virtual is None else request.virtual.key(start, tokens)
            if request.recompute is not None and start + size > request.num_prompt:
                # As tokens of a prompt, the generated ones would have other bits.
                key += GENERATED + max(0, request.num_prompt - start).to_bytes(4, "little")
            previous = chain[-1].hash if chain else None
            digest = block_hash(previous or request.root, tokens, key)
            chain.append(Content(digest, tokens, previous, request.adapter_version or ""))
        return chain[index]
