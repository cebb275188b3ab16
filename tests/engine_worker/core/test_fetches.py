"""Requests whose blocks another engine of the machine has computed."""

import threading
from pathlib import Path

import pytest

from engine_worker.pool_files.folder import PoolFolder
from sluice.wire.errors import FinishReason
from tests.fakes.engine import EngineBench

PROMPT = list(range(40))
SIZE = 4
"""Tokens per block."""


class Ring:
    """Engines that share a folder of pool files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.warnings: list[str] = []

    def engine(self, name: str, **options) -> EngineBench:
        return EngineBench(
            tokens_per_block=SIZE, folder=PoolFolder(self._folder, name, self.warnings.append), **options
        )


@pytest.fixture
def ring(shared_memory: Path) -> Ring:
    return Ring(shared_memory)


class Gate:
    """Holds back an engine's copies."""

    def __init__(self, bench: EngineBench) -> None:
        self.opened = threading.Event()
        copy = bench.cache.fetches._source.copy

        def wait(digest: bytes, block: int) -> int | None:
            assert self.opened.wait(10)
            return copy(digest, block)

        bench.cache.fetches._source.copy = wait


@pytest.fixture
def twin(ring: Ring) -> EngineBench:
    """An engine beside one that has computed the first 6 tokens after PROMPT."""
    first = ring.engine("a")
    first.submit(PROMPT, max_tokens=6)
    first.run()
    return ring.engine("b")


def resume(bench: EngineBench, **options) -> int:
    """Continue the request that `twin` has computed elsewhere."""
    request = bench.submit(PROMPT, max_tokens=12, attempt=1, **options)
    del bench.inbox[-1]
    expected = bench.expected(request, attempt=1)
    bench.specs.clear()
    return bench.submit(PROMPT, max_tokens=12, attempt=1, resume={0: expected[:6]}, **options)


def test_a_twin_computes_only_the_last_block_again(twin: EngineBench) -> None:
    request = resume(twin)
    twin.run()
    assert twin.output(request, attempt=1) == twin.expected(request, attempt=1)
    # 46 tokens were known: 44 in full blocks, two and the new ones had to be computed.
    assert twin.runner.computed == 2 + 5
    assert twin.cache.fetches.fetched == 11


def test_the_next_engine_takes_over_the_blocks(ring: Ring) -> None:
    first = ring.engine("a")
    first.submit(PROMPT, max_tokens=6)
    first.run()
    first.runner.pool_file.close()
    second = ring.engine("a")
    assert second.cache.tiers.adopted == 11
    assert len(second.cache.tiers.journal.since(0).stored) == 11
    request = resume(second)
    second.run()
    assert second.output(request, attempt=1) == second.expected(request, attempt=1)
    assert second.runner.computed == 2 + 5


def test_blocks_that_are_evicted_are_not_found_elsewhere(ring: Ring) -> None:
    first = ring.engine("a", num_blocks=12)
    first.submit(PROMPT, max_tokens=1)
    first.submit([90 - token for token in PROMPT], max_tokens=1)
    first.run()
    second = ring.engine("b")
    second.submit(PROMPT, max_tokens=1)
    second.run()
    assert second.runner.computed > len(PROMPT) // 2


def test_requests_share_the_copies_of_a_block(twin: EngineBench) -> None:
    gate = Gate(twin)
    requests = [twin.submit(PROMPT, max_tokens=4, seed=seed) for seed in range(5)]
    twin.step()
    assert len(twin.cache.fetches.held) == 9
    gate.opened.set()
    twin.run()
    assert [twin.output(request) for request in requests] == [twin.expected(request) for request in requests]
    assert twin.cache.fetches.fetched == 9


def test_other_requests_run_while_blocks_are_copied(twin: EngineBench) -> None:
    gate = Gate(twin)
    request, other = twin.submit(PROMPT, max_tokens=4), twin.submit([7, 8, 9], max_tokens=4)
    for _ in range(6):
        twin.step()
    assert twin.ended(other) is FinishReason.LENGTH
    gate.opened.set()
    twin.run()
    assert twin.output(request) == twin.expected(request)


def test_a_request_that_ends_while_its_blocks_are_copied(twin: EngineBench) -> None:
    gate = Gate(twin)
    request = twin.submit(PROMPT, max_tokens=4)
    twin.step()
    twin.cancel(request)
    twin.step()
    assert twin.ended(request) is FinishReason.ABORTED
    gate.opened.set()
    while twin.cache.fetches:
        twin.step()
    # The copies serve the next request.
    assert twin.cache.fetches.fetched == 9
    assert twin.cache.pool.available == twin.cache.pool.num_blocks


def test_copies_from_before_a_flush_do_not_count(twin: EngineBench) -> None:
    gate = Gate(twin)
    request = twin.submit(PROMPT, max_tokens=4)
    twin.step()
    twin.cache.flush()
    gate.opened.set()
    twin.run()
    assert twin.cache.fetches.fetched == 0
    assert twin.runner.computed == len(PROMPT) + 3
    assert twin.output(request) == twin.expected(request)


def test_a_copy_that_fails_is_computed(twin: EngineBench) -> None:
    source = twin.cache.fetches._source
    copy, copied = source.copy, []

    def fail_fourth(digest: bytes, block: int) -> int | None:
        copied.append(block)
        return None if len(copied) == 4 else copy(digest, block)

    source.copy = fail_fourth
    request = twin.submit(PROMPT, max_tokens=4)
    twin.run()
    assert twin.output(request) == twin.expected(request)
    assert twin.runner.computed == len(PROMPT) - 3 * SIZE + 3
    assert twin.cache.fetches.refused == {"missing": 1, "memory": 0}


def test_fetches_leave_blocks_for_running_sequences(ring: Ring) -> None:
    first = ring.engine("a")
    first.submit(PROMPT, max_tokens=1)
    first.run()
    second = ring.engine("b", num_blocks=14)
    request = second.submit(PROMPT, max_tokens=4)
    second.run()
    assert second.output(request) == second.expected(request)
    assert second.cache.fetches.fetched == 7
    assert second.cache.fetches.refused["memory"] == 2


def test_every_sequence_gets_its_blocks(ring: Ring) -> None:
    """Two sequences of one request, which resume after different tokens."""
    first = ring.engine("a")
    request = first.submit(PROMPT, max_tokens=9, n=2)
    first.run()
    outputs = {index: first.output(request, index) for index in range(2)}
    second = ring.engine("b")
    request = second.submit(PROMPT, max_tokens=12, n=2, attempt=1, resume={0: outputs[0][:8], 1: outputs[1][:8]})
    second.run()
    # Of 48 known tokens 44 were copied; three more were sampled and computed.
    assert second.runner.computed == 2 * (4 + 3)
    for index in range(2):
        assert second.output(request, index, 1) == second.expected(request, index, 1)


def test_with_a_window_only_the_last_one_is_copied(ring: Ring) -> None:
    first = ring.engine("a", window=9)
    first.submit(PROMPT, max_tokens=1)
    first.run()
    second = ring.engine("b", window=9)
    request = second.submit(PROMPT, max_tokens=4)
    second.run()
    assert second.output(request) == second.expected(request)
    assert second.cache.fetches.fetched <= 3
    assert second.runner.computed == SIZE + 3


def test_a_suspect_request_fetches_too(twin: EngineBench) -> None:
    request = resume(twin, alone=True)
    twin.run()
    assert twin.output(request, attempt=1) == twin.expected(request, attempt=1)
    assert twin.cache.fetches.fetched == 11


def test_blocks_of_the_host_tier_are_in_the_file_again_once_they_are_loaded(ring: Ring) -> None:
    first = ring.engine("a", num_blocks=12, num_host_blocks=24)
    prompts = [[90 - token for token in PROMPT], PROMPT, [token + 50 for token in PROMPT]]
    for prompt in (*prompts, PROMPT):
        first.submit(prompt, max_tokens=2)
        first.run()
    assert first.cache.tiers.onloads
    second = ring.engine("b")
    request = second.submit(PROMPT, max_tokens=4)
    second.run()
    assert second.output(request) == second.expected(request)
    assert second.cache.fetches.fetched == 9


def test_copies_leave_alone_what_is_still_being_moved(ring: Ring) -> None:
    """A block whose content waits to be offloaded must not be overwritten before."""
    first = ring.engine("a")
    first.submit(PROMPT, max_tokens=1)
    first.run()
    second = ring.engine("b", num_blocks=24, num_host_blocks=24, max_batch_size=2)
    for shift in (7, 14, 21, 28):
        second.submit([90 - shift - token for token in PROMPT], max_tokens=12)
    for _ in range(40):
        second.step()
        if second.cache.tiers.pending:
            break
    number = second.submit(PROMPT, max_tokens=4)
    second.run()
    assert second.output(number) == second.expected(number)


def test_requests_with_another_salt_share_nothing(twin: EngineBench) -> None:
    request = twin.submit(PROMPT, max_tokens=4, salt="other")
    twin.run()
    assert twin.output(request) == twin.expected(request)
    assert twin.cache.fetches.fetched == 0


def test_a_request_that_only_awaits_the_copies_of_another(twin: EngineBench) -> None:
    """It is admitted once they are findable, not merely complete, and whether or not the reader is busy."""
    gate = Gate(twin)
    first, second = twin.submit(PROMPT, max_tokens=4), twin.submit(PROMPT, max_tokens=4, seed=1)
    twin.step()
    [copies] = dict.fromkeys(twin.cache.fetches._fetching.values())
    publish = twin.cache.fetches.publish

    def ends_after_publish() -> None:
        publish()
        gate.opened.set()
        copies.totals.result(10)

    twin.cache.fetches.publish = ends_after_publish
    twin.step()
    twin.cache.fetches.publish = publish
    twin.run(limit=100)
    assert [twin.output(request) for request in (first, second)] == [twin.expected(first), twin.expected(second)]
    assert twin.runner.computed == 2 * (SIZE + 3)


def test_copies_do_not_go_to_blocks_that_a_step_moves(ring: Ring) -> None:
    """Host memory receives evicted blocks, but only with the next step: a copy is faster."""
    first = ring.engine("a", num_blocks=40)
    prompts = [[(token + 13 * i) % 97 for token in PROMPT] for i in range(4)]
    for prompt in prompts:
        first.submit(prompt, max_tokens=1)
    first.run()
    second = ring.engine("b", num_blocks=24, num_host_blocks=24, block_reuse=True)
    others = [[(token * 5 + 11 * i) % 97 for token in PROMPT] for i in range(2)]
    for prompt in others:
        second.submit(prompt, max_tokens=1)
    second.run()
    for prompt in (*prompts, *others):
        second.submit(prompt, max_tokens=1)
        second.run()
    assert second.cache.fetches.fetched
    assert all(second.output(number) == second.expected(number) for number, _ in second.specs)
