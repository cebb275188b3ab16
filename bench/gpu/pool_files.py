"""KV blocks in a file that outlives its engine: whether they are right, and what copying them costs.

On a GPU the file has the host pool, to which each block is copied when it is full; on a CPU it has the device pool.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from bench.gpu.checks import GREEDY, TOLERANCES, together, verdict
from bench.gpu.engine import Core, LoadRunner, Served, random_prompts, served
from bench.gpu.findings import Decode, Outcome, Skip
from bench.gpu.measures import COPYING, NOT_COPYING, decode
from bench.gpu.shapes import Shape
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.runner.extensions import Extensions
from engine_worker.runner.load import load_runner
from engine_worker.runner.runner import ModelRunner
from engine_worker.step import Drawn
from sluice.host.memory_files import is_in_memory

SHARED = Path("/dev/shm")  # noqa: S108 - the file systems of other paths are on disks
ROOM = 1.25
"""Room that a file needs in its file system, in relation to its size: a part is left to others."""
Load = Callable[[str], AbstractContextManager[Served]]
"""Loads an engine with this name."""


@contextmanager
def engines(shape: Shape, folder: Path, count: int, **options: Any) -> Iterator[Load]:
    """Loads up to `count` engines at a time with these options of RunnerConfig, all with files in the same folder.
    Raises Skip if memory for files is missing."""
    needed = int(count * ROOM * options["kv_host_memory"])
    free = shutil.disk_usage(SHARED).free if is_in_memory(SHARED) else 0
    if free < needed:
        raise Skip(f"needs {needed >> 20} MiB of memory in {SHARED}, which has {free >> 20}")
    with tempfile.TemporaryDirectory(dir=SHARED, prefix="bench-gpu-") as files:

        def load(name: str) -> AbstractContextManager[Served]:
            return served(shape, folder, _with_file(PoolFolder(Path(files), name, print)), **options)

        yield load


def _with_file(folder: PoolFolder) -> LoadRunner:
    return partial(load_runner, extensions=Extensions(pool_folder=folder))


def check_copies(load: Load, requests: int, longest: int) -> Outcome:
    """Three engines get the same requests: the first computes, its twin copies, and the first one's successor takes
    over."""
    with load("a") as first, load("b") as twin:
        submits = random_prompts(requests, longest, first.shape.vocab_size, seed=4)
        tolerance = TOLERANCES[first.runner.choices["dtype"]]
        computed, copied = _run(first, submits), _run(twin, submits)
        for one in (first, twin):
            file_of(one).close()
    with load("a") as next_one:
        continued = _run(next_one, submits)
    both = [*zip(copied.drawn, computed.drawn, strict=True), *zip(continued.drawn, computed.drawn, strict=True)]
    found = verdict([pair for one in both for pair in together(*one)], tolerance)
    detail = f"{copied.fetched} blocks copied by a twin, {continued.adopted} taken over; {found.detail}"
    return Outcome(found.passed and bool(copied.fetched and continued.adopted), detail)


class Run(NamedTuple):
    drawn: list[list[Drawn]]
    """The sampled tokens of each request."""
    fetched: int
    """Blocks copied from another engine."""
    adopted: int
    """Blocks taken over from another engine."""


def _run(one: Served, prompts: Sequence[list[int]]) -> Run:
    core = Core(one, GREEDY)
    for prompt in prompts:
        core.submit(prompt, len(prompt) // 4 + 1)
    core.finish()
    return Run(core.drawn, *core.copied)


def copying(one: Served, batch: int, prompt: int, steps: int, rounds: int = 2) -> list[Decode]:
    """Generation without and with copies to the file, alternately on the same runner; the fastest of each counts."""
    runner, file = cast(ModelRunner, one.runner), file_of(one)
    found: dict[str, list[Decode]] = {NOT_COPYING: [], COPYING: []}
    for mode in [NOT_COPYING, COPYING] * rounds:
        # Otherwise the engine would begin with the content of the last round, and copy nothing.
        file.clear_all()
        runner.pool_file = file if mode == COPYING else None
        size = runner.tokens_per_block
        found[mode].append(decode(one, mode, batch, prompt, steps, size - 1))
        if mode == COPYING and file.num_valid < batch * ((prompt + steps) // size):
            raise RuntimeError(f"only {file.num_valid} blocks were copied")
    return [min(each, key=lambda one: one.step_seconds) for each in found.values()]


def file_of(one: Served) -> PoolFile:
    file = one.runner.pool_file
    if file is None:
        raise Skip(f"no file for the KV cache in {SHARED}")
    return file
