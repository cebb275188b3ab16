import pytest

from bench.harness.load import Run, Trace
from bench.harness.stats import figures, ratio


def run(seconds: float, start: float = 0.0) -> Run:
    first = Trace(start, [start + 0.1, start + 0.3, start + 0.6], [1, 2, 1], [])
    return Run(seconds, {"engine": 0.004}, [first, Trace(start, [start + 0.2], [4], [])])


def test_figures_are_medians_over_the_runs():
    summary = figures([run(1.0), run(2.0), run(4.0)])
    assert summary.tokens_per_second == pytest.approx(4.0)
    assert summary.tokens_per_second_range == pytest.approx((2.0, 8.0))
    assert summary.first_token_p50 == pytest.approx(150)
    assert summary.first_token_p99 == pytest.approx(199)
    assert summary.inter_token_p50 == pytest.approx(250)
    assert summary.tokens_per_delta == pytest.approx(2.0)
    assert summary.cpu_per_token == {"engine": pytest.approx(500)}
    assert summary.repeats == 3


def test_requests_of_one_delta_have_no_time_between_deltas():
    summary = figures([Run(1.0, {}, [Trace(0.0, [0.5], [3], [])])])
    assert summary.inter_token_p50 is None
    assert summary.inter_token_p99 is None


def test_ratio_is_the_median_of_the_ratios_of_the_rounds():
    assert ratio([run(1.0), run(9.0), run(2.0)], [run(2.0), run(9.0), run(8.0)]) == pytest.approx(2.0)
