"""Figures of runs."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.harness.load import Run
from sluice.loadgen.report import percentile


@dataclass(frozen=True, slots=True)
class Figures:
    """One system under one load: medians over the repeats. Times in milliseconds, CPU in microseconds."""

    tokens_per_second: float
    tokens_per_second_range: tuple[float, float]
    first_token_p50: float
    first_token_p99: float
    inter_token_p50: float | None
    """Between two deltas of one stream; None if no stream had two."""
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
    return _tokens(run) / run.seconds


def ratio(runs: Sequence[Run], base: Sequence[Run]) -> float:
    """Median over the rounds of one system's rate by another's."""
    return statistics.median(rate(a) / rate(b) for a, b in zip(runs, base, strict=True))


def sustained_rate(run: Run) -> float:
    """Of the time while another request took each place that became free: without the end of a run, where the last of
    few sequences decides when it is over."""
    began, ended = (end(trace.submitted for trace in run.traces) for end in (min, max))
    if ended == began:
        return rate(run)
    arrived = ((at, count) for trace in run.traces for at, count in zip(trace.arrivals, trace.counts, strict=True))
    return sum(count for at, count in arrived if at <= ended) / (ended - began)


def sustained_ratio(runs: Sequence[Run], base: Sequence[Run]) -> float:
    """As `ratio`."""
    return statistics.median(sustained_rate(a) / sustained_rate(b) for a, b in zip(runs, base, strict=True))


def thinned(samples: Sequence[float], most: int = 1000) -> list[float]:
    """Sorted, rounded to four digits; of more than `most` samples, that many evenly spaced quantiles."""
    if len(samples) > most:
        samples = np.quantile(samples, np.linspace(0, 1, most)).tolist()
    return sorted(round(sample, 4) for sample in samples)


def _tokens(run: Run) -> int:
    return sum(sum(trace.counts) for trace in run.traces)


def _median_percentile(samples: Sequence[Sequence[float]], percent: float) -> float:
    return statistics.median(1000 * percentile(each, percent) for each in samples)
