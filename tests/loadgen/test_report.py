"""Results computed from known outcomes."""

import numpy as np
import pytest

from sluice.loadgen.report import details, percentile, summarize
from sluice.loadgen.run import Measured
from sluice.loadgen.target import Outcome


def outcome(start, first, gaps, tail=0.0, **fields):
    arrivals = [start + first]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
    result = Outcome(start, arrivals=arrivals, tokens=[1] * len(arrivals), **fields)
    result.end = arrivals[-1] + tail
    return result


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
    results = summarize([measured], [50], {})
    assert (results["completed"], results["failed"]) == (3, 1)
    assert (results["total_input_tokens"], results["total_output_tokens"]) == (60, 6)
    assert results["request_throughput"] == 0.75
    assert results["output_throughput"] == 1.5
    assert results["total_token_throughput"] == 16.5
    assert results["request_goodput"] is None
    assert results["max_output_tokens_per_s"] == 5
    assert results["max_concurrent_requests"] == 2


def test_times(measured):
    results = summarize([measured], [50, 99.9], {})
    assert results["mean_ttft_ms"] == pytest.approx(300)
    assert results["median_ttft_ms"] == pytest.approx(300)
    assert results["std_ttft_ms"] == pytest.approx(1000 * np.std([0.1, 0.3, 0.5]))
    assert results["p99.9_ttft_ms"] == pytest.approx(1000 * np.percentile([0.1, 0.3, 0.5], 99.9))
    assert results["mean_itl_ms"] == pytest.approx(1000 * np.mean([0.02, 0.04, 0.1]))
    # A request with a single token has no time per output token.
    assert results["mean_tpot_ms"] == pytest.approx((30 + 100) / 2)
    assert results["p50_e2el_ms"] == pytest.approx(400)


def test_goodput_counts_requests_that_meet_all_limits(measured):
    assert summarize([measured], [], {"ttft": 300.001})["request_goodput"] == 0.5
    assert summarize([measured], [], {"ttft": 300.001, "tpot": 50})["request_goodput"] == 0.25
    assert summarize([measured], [], {"e2el": 1})["request_goodput"] == 0


def test_rounds_are_summed(measured):
    failed = Measured([Outcome(0.0, end=1.0, error="no")], 2.0)
    results = summarize([measured, failed], [], {})
    assert (results["completed"], results["failed"], results["duration"]) == (3, 2, 6.0)
    assert results["output_throughput"] == 1.0
    assert results["output_throughput_of_rounds"] == [1.5, 0.0]


def test_without_a_successful_request():
    results = summarize([Measured([Outcome(0.0, end=1.0, error="no")], 1.0)], [99], {"ttft": 1})
    assert (results["completed"], results["failed"]) == (0, 1)
    assert (results["p99_ttft_ms"], results["request_goodput"]) == (0.0, 0.0)


def test_percentiles_are_numpys():
    samples = [3.0, 1.0, 10.0, 2.5]
    for percent in (0, 12.5, 50, 99, 100):
        assert percentile(samples, percent) == pytest.approx(np.percentile(samples, percent))


def test_details_have_an_entry_per_request(measured):
    lists = details(measured.outcomes)
    assert {len(entries) for entries in lists.values()} == {4}
    assert lists["output_lens"] == [3, 2, 1, 0]
    assert lists["errors"] == ["", "", "", "no"]
