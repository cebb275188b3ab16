"""The engine's memory statistics, compared with its sequences and outputs."""

from collections import Counter

import pytest

from engine_worker.core.stats import REFRESH_SECONDS
from engine_worker.request import State
from sluice.wire.stats import RequestProgress, Stage
from tests.fakes.engine import EngineBench

BLOCK = 4
PROMPT = 10
"""Tokens of a prompt: two full blocks and a part of one."""


def reported(bench: EngineBench, request: int) -> list[RequestProgress]:
    return [stats for report in bench.reports for stats in report.requests if stats.request == request]


class FirstAllocations:
    """Records the allocations for sequences without blocks: (request, number of blocks found in the cache)."""

    def __init__(self, bench: EngineBench) -> None:
        self.cached_blocks: list[tuple[int, int]] = []
        self.uncached_tokens: list[int] = []
        """Tokens that were not in the cache and are computed next."""
        allocate = bench.cache.allocate

        def watched(sequences):
            new = [sequence for sequence in sequences if not sequence.blocks]
            allocated = allocate(sequences)
            self.cached_blocks += [(s.request.submit.request, s.num_computed // BLOCK) for s in new if s.blocks]
            self.uncached_tokens += [s.num_pending for s in new if s.blocks]
            return allocated

        bench.cache.allocate = watched

    def of(self, request: int) -> list[int]:
        return [blocks for number, blocks in self.cached_blocks if number == request]


@pytest.fixture
def pressed():
    """Four running requests with memory for two, and three more in the queue."""
    bench = EngineBench(num_blocks=12, tokens_per_block=BLOCK, max_batch_size=4)
    allocations = FirstAllocations(bench)
    requests = [bench.submit(range(12 * i, 12 * i + PROMPT), max_tokens=24) for i in range(7)]
    return bench, allocations, requests


def test_queued_and_paused_sequences_are_reported_separately(pressed):
    bench, _, _ = pressed
    seen: Counter[str] = Counter()
    while bench.step() or bench.engine.live.requests:
        states = Counter(sequence.state for sequence in bench.engine.live.active)
        latest = bench.engine.stats.latest
        assert (latest.queued_requests, latest.paused_requests) == (states[State.WAITING], states[State.PREEMPTED])
        seen["both"] += bool(states[State.WAITING] and states[State.PREEMPTED])
    assert seen["both"]


def test_reused_and_missed_blocks_are_counted_again_after_preemption(pressed):
    bench, allocations, requests = pressed
    bench.run()
    for request in requests:
        ended, found = reported(bench, request)[-1], allocations.of(request)
        assert ended.pauses == len(found) - 1
        assert ended.blocks_reused == sum(found)
        assert ended.blocks_missed == sum(max(0, PROMPT // BLOCK - blocks) for blocks in found)
    paused = [found for found in map(allocations.of, requests) if len(found) > 1]
    assert any(0 in found[1:] for found in paused)
    assert any(max(found[1:]) > 0 for found in paused)


def test_blocks_reused_after_preemption_are_no_cached_prompt_tokens(pressed):
    bench, allocations, requests = pressed
    bench.run()
    assert any(max(allocations.of(request)[1:], default=0) for request in requests)
    assert {stats.cached_tokens for request in requests for stats in reported(bench, request)} == {0}
    assert bench.cache.cached_tokens == 0


def test_context_tokens_include_those_that_are_computed_again_after_a_pause(pressed):
    bench, allocations, requests = pressed
    bench.run()
    latest = [report.step for report in bench.reports if report.step is not None]
    computed = [sum(len(part.tokens) for part in step.slices) for step in bench.runner.steps]
    assert [step.total_context_tokens + step.generation_requests for step in latest] == computed
    # A sequence that lacks only its last token generates at once.
    context = sum(tokens for tokens in allocations.uncached_tokens if tokens > 1)
    assert sum(step.total_context_tokens for step in latest) == bench.engine.stats.context_tokens == context
    assert context > PROMPT * len(requests)


def test_figures_of_a_step_count_the_outputs_of_each_request():
    """Two requests of three and two outputs, in a batch of four, with memory for less."""
    bench = EngineBench(num_blocks=18, tokens_per_block=BLOCK, max_batch_size=4)
    bench.submit(range(PROMPT), max_tokens=24, n=3)
    bench.step()
    bench.submit(range(20, 20 + PROMPT), max_tokens=24, n=2)
    bench.run()
    latest = [report.step for report in bench.reports if report.step is not None]
    counts = [(s.active_requests, s.scheduled_requests, s.queued_requests, s.paused_requests) for s in latest]
    # The first output of a request computes the prompt for the others.
    assert counts[:3] == [(1, 1, 2, 0), (2, 4, 1, 0), (2, 4, 1, 0)]
    assert (2, 2, 1, 2) in counts
    assert [(s.context_requests, s.generation_requests) for s in latest[:3]] == [(1, 0), (1, 3), (0, 4)]
    assert [s.scheduled_requests for s in latest] == [len(step.slices) for step in bench.runner.steps]


def test_a_preempted_request_is_reported_as_paused(pressed):
    bench, _, requests = pressed
    seen = set()
    while bench.step() or bench.engine.live.requests:
        bench.clock.now += REFRESH_SECONDS
        sequences = {s.request.submit.request: s for s in bench.engine.live.active}
        for stats in bench.reports[-1].requests:
            sequence = sequences.get(stats.request)
            if sequence is not None and sequence.state is not State.WAITING:
                assert (stats.stage is Stage.PAUSED) == (sequence.state is State.PREEMPTED)
                seen.add((stats.request, stats.stage))
    paused = {request for request, stage in seen if stage is Stage.PAUSED}
    assert paused
    assert paused == {request for request in requests if reported(bench, request)[-1].pauses}


def test_blocks_before_the_window_are_not_reused():
    """The last of 33 tokens attends to 8: of the eight blocks before it, the last two are needed."""
    bench = EngineBench(tokens_per_block=BLOCK, window=8)
    first, second = (bench.submit(range(33), max_tokens=2) for _ in range(2))
    bench.run()
    assert (reported(bench, first)[-1].blocks_reused, reported(bench, first)[-1].blocks_missed) == (0, 8)
    ended = reported(bench, second)[-1]
    assert (ended.cached_tokens, ended.blocks_reused, ended.blocks_missed) == (32, 2, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_first_and_last_iteration_of_a_request(overlap):
    """Each prompt takes one step, then each token takes one."""
    bench = EngineBench(overlap=overlap)
    lengths = (5, 1, 9, 3)
    requests = []
    for i, length in enumerate(lengths):
        requests.append(bench.submit(range(20 * i, 20 * i + PROMPT), max_tokens=length))
        bench.step()
    bench.run()
    assert reported(bench, requests[0])[0].first_iteration == 1
    for request, length in zip(requests, lengths, strict=True):
        reports = reported(bench, request)
        first, last = reports[-1].first_iteration, reports[-1].iteration
        assert last == first + length - 1
        by_number = {report.step.iteration: report for report in bench.reports if report.step is not None}
        assert any(each.request == request and each.stage is Stage.ENDED for each in by_number[last].requests)
        assert {each.first_iteration for each in reports if each.first_scheduled is not None} == {first}
        assert all(each.first_iteration == 0 for each in reports if each.first_scheduled is None)


def test_host_blocks_are_reported():
    bench = EngineBench(num_blocks=8, tokens_per_block=BLOCK, num_host_blocks=16)
    latest = bench.engine.stats.latest
    assert (latest.max_host_blocks, latest.used_host_blocks) == (16, 0)
    for i in range(4):
        bench.submit(range(20 * i, 20 * i + 16), max_tokens=1)
        bench.run()
    tiers, latest = bench.cache.tiers, bench.engine.stats.latest
    assert tiers.onloads == 0 < tiers.offloads < 16
    assert (latest.max_host_blocks, latest.used_host_blocks) == (16, tiers.offloads)
    steps = [report.step for report in bench.reports if report.step]
    assert {step.max_host_blocks for step in steps} == {16}
    assert steps[-1].used_host_blocks == tiers.offloads
