"""Engines whose host pools are files, as on GPUs."""

from pathlib import Path

import pytest

from engine_worker.pool_files.folder import PoolFolder
from engine_worker.step import MoveKind
from tests.engine_worker.core.test_fetches import Gate
from tests.fakes.engine import EngineBench

PROMPT = list(range(40))
SIZE = 4
"""Tokens per block."""

pytestmark = pytest.mark.usefixtures("both_overlaps")


class Ring:
    """Engines that share a folder of pool files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def engine(self, name: str, *, num_host_blocks: int = 64, **options) -> EngineBench:
        folder = PoolFolder(self._folder, name, print)
        sizes = {"tokens_per_block": SIZE, "num_host_blocks": num_host_blocks}
        return EngineBench(folder=folder, host_file=True, **sizes, **options)


@pytest.fixture
def ring(shared_memory: Path) -> Ring:
    return Ring(shared_memory)


@pytest.fixture
def first(ring: Ring) -> EngineBench:
    """An engine that has computed the first 6 tokens after PROMPT."""
    bench = ring.engine("a")
    bench.submit(PROMPT, max_tokens=6)
    bench.run()
    return bench


def saved(bench: EngineBench) -> int:
    return sum(move.kind is MoveKind.SAVE for step in bench.runner.steps for move in step.moves)


def resumed(bench: EngineBench) -> list[int]:
    """The output of the request that `first` has begun, continued here."""
    spec = bench.submit(PROMPT, max_tokens=12, attempt=1)
    expected = bench.expected(spec, attempt=1)
    del bench.inbox[-1]
    bench.specs.clear()
    request = bench.submit(PROMPT, max_tokens=12, attempt=1, resume={0: expected[:6]})
    bench.run()
    assert bench.output(request, attempt=1) == expected
    return expected


def test_an_idle_engine_makes_the_pending_copies(ring: Ring):
    bench = ring.engine("a")
    bench.submit(PROMPT[:8], max_tokens=1)
    bench.run()
    assert not bench.cache.tiers.saving
    assert saved(bench) == bench.runner.pool_file.num_valid == 2
    # The second step has no sequences, and counts as none.
    assert [len(step.slices) for step in bench.runner.steps] == [1, 0]
    assert bench.engine.stats.latest.iteration == 1


def test_a_twin_computes_only_the_last_block_again(first: EngineBench, ring: Ring):
    twin = ring.engine("b")
    resumed(twin)
    assert twin.cache.fetches.fetched == 11
    assert twin.runner.computed == 2 + 5
    # What it has copied is on its host already.
    assert saved(twin) == (len(PROMPT) + 11) // SIZE - 11


def test_the_next_engine_takes_over_the_blocks(first: EngineBench, ring: Ring):
    first.runner.pool_file.close()
    following = ring.engine("a")
    assert following.cache.tiers.adopted == 11
    assert len(following.cache.tiers.journal.since(0).stored) == 11
    resumed(following)
    assert following.runner.computed == 2 + 5


def test_copies_hold_no_blocks_of_the_device(first: EngineBench, ring: Ring):
    twin = ring.engine("b", num_blocks=12)
    gate = Gate(twin)
    request = twin.submit(PROMPT, max_tokens=4)
    twin.step()
    assert len(twin.cache.fetches.held) == 9
    assert twin.cache.pool.available == 12
    gate.opened.set()
    twin.run()
    assert twin.output(request) == twin.expected(request)


def test_a_failed_step_without_sequences_saves_nothing(ring: Ring):
    bench = ring.engine("a")
    bench.submit(PROMPT[:8], max_tokens=1)
    while not bench.cache.tiers.saving:
        bench.step()
    bench.runner.fail = "before"
    bench.step()
    assert bench.runner.failures == 1
    assert bench.runner.pool_file.num_valid == 0
    # The device still has the blocks.
    bench.submit(PROMPT[:9], max_tokens=1)
    bench.run()
    assert bench.runner.computed == 8 + 1


def test_a_pool_that_evicts_gives_the_same_tokens(ring: Ring):
    bench = ring.engine("a", num_blocks=14, num_host_blocks=64)
    prompts = [[(token + shift) % 97 for token in PROMPT] for shift in (0, 17, 33, 50)]
    for _ in range(3):
        requests = [bench.submit(prompt, max_tokens=6) for prompt in prompts]
        bench.run()
        assert [bench.output(request) for request in requests] == [bench.expected(request) for request in requests]
    assert bench.cache.tiers.onloads
