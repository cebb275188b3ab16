"""StaticBatch: one batch after the other, and its statistics."""

from sluice.settings.engine import SchedulerNames
from tests.fakes.engine import EngineBench


def test_statistics_of_a_batch():
    bench = EngineBench(schedulers=SchedulerNames("static_batch"), max_batch_size=3, block_reuse=False)
    for number, max_tokens in enumerate((2, 4, 3, 2)):
        bench.submit(range(number * 10, number * 10 + 4), max_tokens=max_tokens)
    figures = []
    while bench.step():
        latest = bench.engine.stats.latest
        figures.append((latest.scheduled_requests, latest.total_generation_tokens, latest.empty_generation_slots))
    assert figures == [(3, 3, 0), (3, 6, 0), (2, 8, 1), (1, 9, 2), (1, 1, 0), (1, 2, 0)]


def test_statistics_of_a_resumed_batch():
    """Only tokens of this attempt and slots of its sequences count."""
    bench = EngineBench(schedulers=SchedulerNames("static_batch"))
    output = bench.submit(range(4), max_tokens=5)
    bench.run()
    generated = bench.output(output)[:3]
    bench.submit(range(4), max_tokens=5, n=3, resume={0: generated}, ended=[1])
    figures = []
    while bench.step():
        latest = bench.engine.stats.latest
        figures.append((latest.scheduled_requests, latest.total_generation_tokens, latest.empty_generation_slots))
    assert figures == [(2, 2, 0), (2, 4, 0), (1, 5, 1), (1, 6, 1), (1, 7, 1)]


def test_prompts_with_a_common_prefix_form_one_batch():
    """The first request computes the common prefix; the slots of the others are reserved."""
    bench = EngineBench(schedulers=SchedulerNames("static_batch"), max_batch_size=4)
    for number in range(3):
        bench.submit([*range(8), 50 + number], max_tokens=6)
    bench.step()
    late = bench.submit([80], max_tokens=1)
    assert len(bench.cache.holders) == 1
    bench.step()
    assert {s.request.submit.request for s in bench.cache.holders} == {1, 2, 3}
    assert bench.runner.computed == 9 + 1 + 1 + 1
    bench.run()
    assert bench.output(late) == bench.expected(late)


def test_a_request_that_arrives_during_a_batch_waits_for_its_end():
    bench = EngineBench(schedulers=SchedulerNames("static_batch"))
    long = bench.submit(range(4), max_tokens=9)
    bench.step()
    late = bench.submit([70], max_tokens=1)
    while bench.ended(long) is None:
        bench.step()
        assert (late, 0, 0) not in bench.receiver.streams
    bench.run()
    assert bench.output(late) == bench.expected(late)
