"""Pool files as the state machine of engines that share them sees them: what they contain, and damage."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import numpy as np

from engine_worker.kvcache.fetches import Target
from engine_worker.pool_files.layout import HEADER, MAGIC, Layout, Places, check_of, num_blocks_of
from engine_worker.pool_files.pool_file import block_sum, word_of
from tests.fakes.engine import EngineBench
from tests.fakes.scripted_tokens import mix


class KilledError(BaseException):
    """The engine has died, in the middle of what it was doing."""


class Reader:
    """In place of an engine's reader thread: copies blocks when it is told to."""

    def __init__(self, bench: EngineBench) -> None:
        self.failing = 0
        """Number of the next copies that fail."""
        self.jobs: list[tuple[Callable[[list[Target]], list[int | None]], list[Target], list[int | None], Future]] = []
        bench.cache.fetches._reader = self

    def submit(self, copy: Callable[[list[Target]], list[int | None]], targets: list[Target]) -> Future:
        self.jobs.append((copy, targets, [], Future()))
        return self.jobs[-1][-1]

    def copy(self, count: int) -> None:
        """Copy up to `count` blocks."""
        while self.jobs and count > 0:
            copy, targets, copied, future = self.jobs[0]
            if self.failing:
                self.failing -= 1
                copied.append(None)
            else:
                copied += copy([targets[len(copied)]])
            count -= 1
            if len(copied) == len(targets):
                del self.jobs[0]
                future.set_result(copied)


class KillSwitch:
    """Ends an engine at one of its next writes: to a block, to the file's index, or in between."""

    def __init__(self, bench: EngineBench, writes: int) -> None:
        self._left = writes
        for owner, name in (
            (bench.runner.kv_cache, "write"),
            (bench.runner.kv_cache, "move"),
            (bench.runner.pool_file, "put"),
            (bench.runner.pool_file, "sum"),
            (bench.runner.pool_file, "_link"),
            (bench.runner.pool_file, "clear"),
        ):
            setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._die()
            return function(*arguments)

        return call

    def _die(self) -> NoReturn:
        raise KilledError


class FileView:
    """A pool file as it is on the file system, whoever owns it."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._data = path.read_bytes()
        self._layout = layout

    def whole(self) -> Iterator[tuple[int, bytes, np.ndarray]]:
        """(block, hash, words [slots, 2]) of each block that another engine would accept."""
        if len(self._data) < HEADER.itemsize:
            return
        header = np.frombuffer(self._data[: HEADER.itemsize], HEADER)
        if header["magic"][0] != MAGIC:
            return
        num_blocks = int(header["num_blocks"][0])
        if not 0 < num_blocks * self._layout.block_bytes <= len(self._data):
            return
        places, size = Places.of(self._layout, num_blocks), self._layout.parts[0]
        if places.size != len(self._data):
            return
        entries = np.frombuffer(self._data, self._layout.entry, num_blocks, places.entries)
        for block in np.flatnonzero(entries["valid"]).tolist():
            entry = entries[block]
            start = places.parts[0] + block * size
            data = np.frombuffer(self._data[start : start + size], word_of(size))
            if int(entry["check"]) == check_of(entry) and int(entry["sum"]) == block_sum([data]):
                yield block, entry["hash"].tobytes(), data.view("<u8").reshape(-1, 2)

    def check(self, digests: dict[bytes, int]) -> None:
        """`digests`: see `MemoryCheck`."""
        for _, digest, words in self.whole():
            slots = [(token - 1, state) for token, state in words.tolist()]
            assert min(token for token, _ in slots) >= 0, f"a slot was never written: {slots}"
            for (_, before), (token, state) in pairwise(slots):
                assert state == mix(before, token), f"{slots} mixes two sequences"
            assert digests.setdefault(digest, slots[-1][1]) == slots[-1][1], f"{slots} follows another prefix"


def damage(path: Path, layout: Layout, choices: Random, *, alive: bool) -> None:
    """Overwrite or cut off a part. `alive`: only of what readers use and the owner does not."""
    size = path.stat().st_size
    if size == 0:
        return
    places = Places.of(layout, 1)
    kind = choices.choice(["buckets"] if alive else ["cut", "header", "entries", "entries", "anywhere", "anywhere"])
    if kind == "cut":
        os.truncate(path, choices.randrange(size))
        return
    with path.open("rb") as file:
        num_blocks = num_blocks_of(file.fileno(), layout)
    if num_blocks is not None:
        places = Places.of(layout, num_blocks)
    begin, end = {
        "header": (0, HEADER.itemsize),
        "entries": (places.entries, places.buckets),
        "buckets": (places.buckets, places.parts[0]),
        "anywhere": (0, size),
    }[kind]
    with path.open("r+b", buffering=0) as file:
        for _ in range(choices.choice([1, 4, 40])):
            # Not a few bits: two of these could leave a sum as it was.
            noise = np.random.default_rng(choices.getrandbits(32)).bytes(choices.choice([1, 8]))
            os.pwrite(file.fileno(), noise, max(0, min(end - len(noise), choices.randrange(begin, end))))
