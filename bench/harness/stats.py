"""Statistics of runs."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.harness.load import Run
from sluice.loadgen.report import percentile


@dataclass(frozen=True, slots=True)
class Figures:
    """Statistics of one system under one load: medians over the repeats. Times are in milliseconds, CPU times in
    microseconds."""

    tokens_per_second: float
    tokens_per_second_range: tuple[float, float]
    """Lowest and highest of the repeats."""
    first_token_p50: float
    first_token_p99: float
    inter_token_p50: float | None
    """Time between two deltas of a stream. None if no stream had two deltas."""
    inter_token_p99: float | None
    tokens_per_delta: float
    cpu_per_token: dict[str, float]
    repeats: int


def figures(runs: Sequence[Run]) -> Figures:
    rates = [rate(run) for run in runs]
    firsts = [[trace.arrivals[0] - trace.submitted for trace in run.traces] for run in runs]
    gaps = [[b - a for trace in run.traces for a, b in pairwise(trace.arrivals)] for run in runs]
    return Figures(
        tokens_per_second=statistics.median(rates),
        tokens_per_second_range=(min(rates), max(rates)),
        first_token_p50=_median_percentile(firsts, 50),
        first_token_p99=_median_percentile(firsts, 99),
        inter_token_p50=_median_percentile(gaps, 50) if all(gaps) else None,
        inter_token_p99=_median_percentile(gaps, 99) if all(gaps) else None,
        tokens_per_delta=statistics.median(_tokens(run) / sum(len(t.arrivals) for t in run.traces) for run in runs),
        cpu_per_token={
            process: statistics.median(1e6 * run.cpu[process] / _tokens(run) for run in runs) for process in runs[0].cpu
        },
        repeats=len(runs),
    )


def rate(run: Run) -> float:
    """Tokens per second."""
    return _tokens(run) / run.seconds


def ratio(runs: Sequence[Run], base: Sequence[Run]) -> float:
    """Rate of one system divided by that of another: the median over the rounds."""
    return statistics.median(rate(a) / rate(b) for a, b in zip(runs, base, strict=True))


def sustained_rate(run: Run) -> float:
    """Tokens per second until the last request was submitted, while the number of requests in flight was constant. The
    end of a run is excluded, because its duration depends on the longest of a few sequences."""
    began, ended = (end(trace.submitted for trace in run.traces) for end in (min, max))
    if ended == began:
        return rate(run)
    arrived = ((at, count) for trace in run.traces for at, count in zip(trace.arrivals, trace.counts, strict=True))
    return sum(count for at, count in arrived if at <= ended) / (ended - began)


def sustained_ratio(runs: Sequence[Run], base: Sequence[Run]) -> float:
    """As `ratio`, of sustained rates."""
    return statistics.median(sustained_rate(a) / sustained_rate(b) for a, b in zip(runs, base, strict=True))


def thinned(samples: Sequence[float], most: int = 1000) -> list[float]:
    """The samples, sorted and rounded to four digits; of more than `most` samples, as many evenly spaced quantiles."""
    if len(samples) > most:
        samples = np.quantile(samples, np.linspace(0, 1, most)).tolist()
    return sorted(round(sample, 4) for sample in samples)


def _tokens(run: Run) -> int:
    return sum(sum(trace.counts) for trace in run.traces)


def _median_percentile(samples: Sequence[Sequence[float]], percent: float) -> float:
    return statistics.median(1000 * percentile(each, percent) for each in samples)
