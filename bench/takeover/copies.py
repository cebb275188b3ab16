"""What it costs to file blocks, to copy and to adopt them, and to find that there is nothing to copy."""

import statistics
import time
from pathlib import Path

import msgspec

from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.peer_files import SETTLED_SECONDS
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Content

SMOLLM2 = Layout("bench", 32, (24_576,) * 60)
"""The blocks of SmolLM2-135M in float32: keys and values of 30 layers, each with 3 heads of 64 values."""
FILINGS, LOOKUPS = 3, 200
GIGABYTE = 1e9
FRESH_LIMIT, AGAIN_LIMIT = 0.4, 0.05
"""Highest acceptable CPU seconds of copying 4,096 tokens."""
NOTHING_LIMIT = 20.0
ADOPTION_LIMIT = 0.3


class Copies(msgspec.Struct, frozen=True):
    """Medians of the rounds, in CPU time: other load on the machine changes it less."""

    tokens: int
    filed: float
    """CPU microseconds of the sum and the entry of a block, and of clearing the entry."""
    fresh: float
    """CPU seconds of copying the blocks of this many tokens into memory that was never used."""
    again: float
    """The same into memory that was used before."""
    nothing: float
    """CPU microseconds of the look-up of a request of which no block is in another file."""
    adoption: float
    """CPU seconds per gigabyte of adopting a file."""


def measure(folder: Path, tokens: int, rounds: int) -> Copies:
    found = [_round(folder / str(i), tokens) for i in range(rounds)]
    return Copies(tokens, *(statistics.median(values) for values in zip(*found, strict=True)))


def _round(folder: Path, tokens: int) -> tuple[float, ...]:
    blocks = tokens // SMOLLM2.tokens_per_block
    _, source = _open(folder, "source", blocks)
    for block in range(blocks):
        source.reserve(block)
        for part in source.parts:
            part[block] = block
    contents = [Content(_digest(block), (block,) * SMOLLM2.tokens_per_block, None, "") for block in range(blocks)]
    filed = _file(source, contents)
    reader, target = _open(folder, "target", blocks)
    fresh, again = (_copy(reader, target, blocks) for _ in range(2))
    nothing = _look_up(reader, _digest(blocks))
    source.close()
    _, adopted = _open(folder, "source", blocks)
    began = time.process_time()
    if sum(1 for _ in adopted.adopted()) != blocks:
        raise RuntimeError(f"of {blocks} blocks, not all were adopted")
    seconds = time.process_time() - began
    for file in (adopted, target):
        file.close()
    reader.delete_dead()
    return filed, fresh, again, nothing, seconds / (blocks * SMOLLM2.block_bytes / GIGABYTE)


def _open(folder: Path, name: str, blocks: int) -> tuple[PoolFolder, PoolFile]:
    opened = PoolFolder(folder, name, _refuse)
    file = opened.open(SMOLLM2, "", lambda: blocks)
    if file is None:
        raise RuntimeError(f"{folder} has no room for {blocks} blocks")
    return opened, file


def _refuse(reason: str) -> None:
    raise RuntimeError(f"the blocks are not in a file: {reason}")


def _file(source: PoolFile, contents: list[Content]) -> float:
    """CPU microseconds for each block. The blocks are valid in the end."""
    began = time.process_time()
    for _ in range(FILINGS):
        for block, content in enumerate(contents):
            source.clear(block)
            source.put(block, content)
    return 1e6 * (time.process_time() - began) / (FILINGS * len(contents))


def _copy(reader: PoolFolder, target: PoolFile, blocks: int) -> float:
    """CPU seconds."""
    began = time.process_time()
    if reader.empty:
        raise RuntimeError("there is nothing to copy")
    for block in range(blocks):
        target.reserve(block)
        if reader.copy(_digest(block), block) is None:
            raise RuntimeError(f"block {block} was not copied")
    return time.process_time() - began


def _look_up(reader: PoolFolder, digest: bytes) -> float:
    """CPU microseconds of a request's look-up, as `Fetches` does it: no other block is looked up if the first is
    nowhere."""
    # A folder that has just changed is listed again and again.
    time.sleep(2 * SETTLED_SECONDS)
    began = time.process_time()
    for _ in range(LOOKUPS):
        if reader.empty or reader.has(digest):
            raise RuntimeError("the look-up found a block that no engine has")
    return 1e6 * (time.process_time() - began) / LOOKUPS


def _digest(number: int) -> bytes:
    return number.to_bytes(16, "little")
