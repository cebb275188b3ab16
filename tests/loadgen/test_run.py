"""The times at which requests are sent, in virtual time."""

import asyncio
from itertools import pairwise

import pytest

from sluice.loadgen.run import Pace, run_load
from sluice.loadgen.workload import Request
from tests.sim.loop import VirtualLoop


class Slow:
    """A server that sends a token every second."""

    model = "slow"

    def __init__(self):
        self.live = self.max_live = 0

    async def send(self, request, outcome):
        self.live += 1
        self.max_live = max(self.max_live, self.live)
        for _ in range(request.max_tokens):
            await asyncio.sleep(1.0)
            outcome.on_chunk(asyncio.get_running_loop().time(), "x")
        self.live -= 1

    async def close(self):
        pass


def run(count, pace, tokens=3, seed=0):
    ended = []
    target = Slow()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        measured = runner.run(run_load(target, [Request("p", tokens)] * count, pace, seed, ended.append))
    assert sorted(map(id, ended)) == sorted(map(id, measured.outcomes))
    return target, measured


def test_without_limits_all_requests_are_sent_immediately():
    target, measured = run(5, Pace())
    assert target.max_live == 5
    assert measured.seconds == pytest.approx(3.0)
    assert [outcome.first_token for outcome in measured.outcomes] == pytest.approx([1.0] * 5)
    assert [outcome.gaps for outcome in measured.outcomes] == [pytest.approx([1.0, 1.0])] * 5


def test_with_limited_concurrency_the_time_in_the_queue_is_no_latency():
    target, measured = run(5, Pace(concurrency=2))
    assert target.max_live == 2
    assert measured.seconds == pytest.approx(9.0)
    assert [outcome.queued for outcome in measured.outcomes] == pytest.approx([0, 0, 3, 3, 6])
    assert [outcome.latency for outcome in measured.outcomes] == pytest.approx([3.0] * 5)


def test_a_rate_spreads_the_requests():
    _, measured = run(50, Pace(rate=5.0))
    starts = [outcome.start for outcome in measured.outcomes]
    assert starts == sorted(starts)
    assert max(starts) - 1000.0 == pytest.approx(10.0, abs=0.1)
    gaps = [b - a for a, b in pairwise(starts)]
    assert min(gaps) < 0.1 < 0.4 < max(gaps)


def test_arrivals_are_those_of_a_poisson_process():
    times = Pace(rate=2.0).arrivals(4000, seed=3)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert times[-1] == pytest.approx(2000.0)
    # In an exponential distribution, a fraction of 1 / e exceeds the mean.
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)
    assert Pace(rate=2.0).arrivals(10, 1) == Pace(rate=2.0).arrivals(10, 1) != Pace(rate=2.0).arrivals(10, 2)
