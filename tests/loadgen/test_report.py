"""Figures of known outcomes."""

import numpy as np
import pytest

from sluice.loadgen.outcome import Outcome
from sluice.loadgen.report import details, percentile, summarize
from sluice.loadgen.run import Measured


def outcome(start, first, gaps, tail=0.0, **fields):
    arrivals = [start + first]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
    found = Outcome(start, arrivals=arrivals, tokens=[1] * len(arrivals), **fields)
    found.end = arrivals[-1] + tail
    return found


@pytest.fixture
def measured():
    return Measured(
        [
            outcome(0.0, 0.1, [0.02, 0.04], prompt_tokens=10, completion_tokens=3),
            outcome(0.1, 0.3, [0.10], prompt_tokens=20),
            outcome(2.0, 0.5, [], prompt_tokens=30, completion_tokens=1),
            Outcome(0.0, end=9.0, error="no"),
        ],
        seconds=4.0,
    )


def test_throughput(measured):
    found = summarize([measured], [50], {})
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (60, 6)
    assert found["request_throughput"] == 0.75
    assert found["output_throughput"] == 1.5
    assert found["total_token_throughput"] == 16.5
    assert found["request_goodput"] is None
    assert found["max_output_tokens_per_s"] == 5
    assert found["max_concurrent_requests"] == 2


def test_times(measured):
    found = summarize([measured], [50, 99.9], {})
    assert found["mean_ttft_ms"] == pytest.approx(300)
    assert found["median_ttft_ms"] == pytest.approx(300)
    assert found["std_ttft_ms"] == pytest.approx(1000 * np.std([0.1, 0.3, 0.5]))
    assert found["p99.9_ttft_ms"] == pytest.approx(1000 * np.percentile([0.1, 0.3, 0.5], 99.9))
    assert found["mean_itl_ms"] == pytest.approx(1000 * np.mean([0.02, 0.04, 0.1]))
    # A single token has no time per token after the first.
    assert found["mean_tpot_ms"] == pytest.approx((30 + 100) / 2)
    assert found["p50_e2el_ms"] == pytest.approx(400)


def test_goodput_counts_requests_that_meet_all_limits(measured):
    assert summarize([measured], [], {"ttft": 300.001})["request_goodput"] == 0.5
    assert summarize([measured], [], {"ttft": 300.001, "tpot": 50})["request_goodput"] == 0.25
    assert summarize([measured], [], {"e2el": 1})["request_goodput"] == 0


def test_rounds_count_together(measured):
    idle = Measured([Outcome(0.0, end=1.0, error="no")], 2.0)
    found = summarize([measured, idle], [], {})
    assert (found["completed"], found["failed"], found["duration"]) == (3, 2, 6.0)
    assert found["output_throughput"] == 1.0
    assert found["output_throughput_of_rounds"] == [1.5, 0.0]


def test_nothing_succeeded():
    found = summarize([Measured([Outcome(0.0, end=1.0, error="no")], 1.0)], [99], {"ttft": 1})
    assert (found["completed"], found["failed"], found["p99_ttft_ms"], found["request_goodput"]) == (0, 1, 0.0, 0.0)


def test_percentiles_are_numpys():
    samples = [3.0, 1.0, 10.0, 2.5]
    for percent in (0, 12.5, 50, 99, 100):
        assert percentile(samples, percent) == pytest.approx(np.percentile(samples, percent))


def test_details_have_an_entry_per_request(measured):
    found = details(measured.outcomes)
    assert {len(entries) for entries in found.values()} == {4}
    assert found["output_lens"] == [3, 2, 1, 0]
    assert found["errors"] == ["", "", "", "no"]
