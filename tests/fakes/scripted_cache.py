"""The KV cache of the scripted runner: each slot holds a token and the digest of all tokens up to it."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Move, Slice
from tests.fakes.scripted_tokens import VOCAB, mix, shown_to_model

Slot = tuple[int, int] | None
"""A token, and the digest of all tokens up to and including it. None: never written."""

SlotIndex = tuple[int, int]
"""(block, offset within the block), on the device."""


class FileSlots(Sequence[Slot]):
    """The slots of one block, in a pool file."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        """`words`: [slots, 2]: the token plus 1, or 0 if the slot was never written, and the digest."""
        self._words = words

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, offset: int) -> Slot:
        token, state = self._words[offset].tolist()
        return (token - 1, state) if token else None

    def __setitem__(self, offset: int, slot: Slot) -> None:
        self._words[offset] = (0, 0) if slot is None else (slot[0] + 1, slot[1])

    def __iter__(self) -> Iterator[Slot]:
        return ((token - 1, state) if token else None for token, state in self._words.tolist())

    def __contains__(self, slot: object) -> bool:
        return slot in list(self)

    def copy(self) -> list[Slot]:
        return list(self)


class FileBlocks:
    """The blocks of one pool of a scripted cache, in a pool file."""

    def __init__(self, file: PoolFile) -> None:
        self._words = file.parts[0].view(np.uint64).reshape(file.num_blocks + 1, -1, 2)

    @staticmethod
    def layout(tokens_per_block: int, *, on_host: bool = False) -> Layout:
        return Layout("scripted", tokens_per_block, (16 * tokens_per_block,), on_host)

    def __getitem__(self, block: int) -> FileSlots:
        return FileSlots(self._words[block])

    def __setitem__(self, block: int, slots: list[Slot]) -> None:
        for offset, slot in enumerate(slots):
            self[block][offset] = slot

    def copy(self) -> list[list[Slot]]:
        return [self[block].copy() for block in range(len(self._words))]


class ScriptedCache:
    """Reads a slice's whole context back through its block table, so that every wrong or missing block shows.

    Appends to `violations` what no attention kernel would survive: slots that were never written or that hold another
    sequence's tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        num_host_blocks: int,
        window: int | None,
        violations: list[str],
    ) -> None:
        self.window = window
        self.tokens_per_block = tokens_per_block
        self.blocks: list[list[Slot]] | FileBlocks = [[None] * tokens_per_block for _ in range(num_blocks)]
        self.host_blocks: list[list[Slot]] | FileBlocks = [[None] * tokens_per_block for _ in range(num_host_blocks)]
        self._violations = violations

    def move(self, moves: Iterable[Move]) -> None:
        for kind, source, target in moves:
            read = self.host_blocks if kind.from_host else self.blocks
            written = self.host_blocks if kind.to_host else self.blocks
            written[target] = read[source].copy()

    def write(self, part: Slice, initial: int) -> None:
        """Fill the slots of the slice's tokens. `initial`: the digest of an empty sequence with the slice's adapter."""
        if not part.tokens:
            self._violations.append("a slice without tokens")
        if part.virtual is None and max(part.tokens, default=0) >= VOCAB:
            self._violations.append(f"{part} does not say what its virtual tokens stand for")
        state = initial
        if part.start:
            slots, offset = self._slots(part, part.start - 1)
            previous = slots[offset]
            state = previous[1] if previous else -1
        for position, token in enumerate(shown_to_model(part.tokens, part.virtual), part.start):
            state = mix(state, token)
            slots, offset = self._slots(part, position)
            slots[offset] = (token, state)

    def read(self, part: Slice, omitted: int, initial: int) -> tuple[list[int], int]:
        """The slice's context without its last `omitted` tokens.

        Returns the tokens from the first one that the slice's first token attends to, and the digest of all tokens.
        """
        first = 0 if self.window is None else max(0, part.start - self.window + 1)
        state, tokens = initial, []
        for position in range(first, part.start + len(part.tokens) - omitted):
            slots, offset = self._slots(part, position)
            slot = slots[offset]
            if slot is not None:
                state = slot[1] if position == first > 0 else mix(state, slot[0])
            if slot is None or slot[1] != state:
                self._violations.append(f"position {position} of {part} holds {slot}")
                break
            tokens.append(slot[0])
        return tokens, state

    def slots_of(self, part: Slice, start: int, end: int) -> set[SlotIndex]:
        """Slots of positions `start` to `end` - 1 of a slice's sequence."""
        size = self.tokens_per_block
        return {(part.block_table[position // size], position % size) for position in range(max(0, start), end)}

    def slots_seen(self, part: Slice, end: int) -> set[SlotIndex]:
        """Slots of the positions before `end` that the slice's tokens attend to."""
        return self.slots_of(part, 0 if self.window is None else part.start - self.window + 1, end)

    def _slots(self, part: Slice, position: int) -> tuple[list[Slot], int]:
        index, offset = divmod(position, self.tokens_per_block)
        return self.blocks[part.block_table[index]], offset
