"""Messages between an engine and a keeper. Bounds are checked when a message is decoded.

An engine asks, and the keeper answers in the same order. The frame of a message begins with PREFIX. The frames of
blocks follow that of `Blocks`.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from engine_worker.pool_files.layout import HASH_BYTES, Layout
from sluice.wire.message import VERSION, Count, Message, Number

PREFIX: Final = b"SK" + VERSION.to_bytes(2, "little")
"""A frame of another version is malformed."""
MAX_FIND: Final = 16384
"""Hashes in a question for what is there."""
MAX_READ: Final = 4096
ANSWER_BYTES: Final = 8 << 20
"""Bytes of the blocks in an answer; more only if a single block is larger."""
MAX_BLOCK_BYTES: Final = 64 << 20
MAX_NAME: Final = 1 << 15
"""Characters. That of a model with 30 layers has 1,400."""
MAX_TOKENS: Final = 1024
"""In a block."""
MAX_QUESTION_BYTES: Final = 1 << 20
"""More than the largest question: MAX_FIND hashes, and a layout."""

Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Sum = Annotated[int, Meta(ge=0)]


class LayoutForm(msgspec.Struct, frozen=True, array_like=True):
    """A `Layout` in a message."""

    name: str
    """Names the shape of each layer's tensors."""
    tokens_per_block: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    parts: Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 30)], ...], Meta(min_length=1, max_length=4096)]
    on_host: bool

    def __post_init__(self) -> None:
        if len(self.name) > MAX_NAME:
            raise ValueError(f"name: a layout's name must have at most {MAX_NAME} characters (got {len(self.name)})")
        if not 1 <= self.tokens_per_block <= MAX_TOKENS:
            raise ValueError(f"tokens_per_block: must be 1 to {MAX_TOKENS} (got {self.tokens_per_block})")
        if sum(self.parts) > MAX_BLOCK_BYTES:
            raise ValueError(f"parts: a block must have at most {MAX_BLOCK_BYTES} bytes (got {sum(self.parts)})")

    @property
    def layout(self) -> Layout:
        return Layout(self.name, self.tokens_per_block, self.parts, self.on_host)


class FindBlocks(Message, frozen=True):
    """Asks how many leading blocks of a list are there. `number`: identifies the question."""

    number: Number
    layout: LayoutForm
    hashes: Annotated[list[Hash], Meta(max_length=MAX_FIND)]


class FoundBlocks(Message, frozen=True):
    number: Number
    count: Count


class ReadBlocks(Message, frozen=True):
    """Asks for the leading blocks of a list, up to ANSWER_BYTES."""

    number: Number
    layout: LayoutForm
    hashes: Annotated[list[Hash], Meta(max_length=MAX_READ)]


class Blocks(Message, frozen=True):
    """The blocks before the first one that is not there. For each a frame follows, with its parts one after the
    other."""

    number: Number
    sums: Annotated[list[Sum], Meta(max_length=MAX_READ)]
    """The `block_sum` of each."""


class DropBlocks(Message, frozen=True):
    """The caches are flushed: all blocks on disk are deleted."""

    number: Number


class Dropped(Message, frozen=True):
    number: Number
    done: bool
    """Whether no block will be back after a restart of the keeper."""


Question = FindBlocks | ReadBlocks | DropBlocks
Answer = FoundBlocks | Blocks | Dropped


def form_of(layout: Layout) -> LayoutForm:
    """Raises ValueError for a layout that is out of bounds."""
    return LayoutForm(layout.name, layout.tokens_per_block, layout.parts, layout.on_host)


def encode(message: Message) -> bytes:
    return PREFIX + msgspec.msgpack.encode(message)


def body_of(frame: bytes | memoryview) -> memoryview:
    """The encoded message. Raises ValueError for a frame of another version, or of something else."""
    view = memoryview(frame)
    if bytes(view[: len(PREFIX)]) != PREFIX:
        raise ValueError("not a frame of this version")
    return view[len(PREFIX) :]


def blocks_per_answer(layout: Layout) -> int:
    """Largest number of blocks in an answer."""
    return max(1, min(MAX_READ, ANSWER_BYTES // layout.block_bytes))
