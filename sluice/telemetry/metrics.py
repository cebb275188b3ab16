"""Prometheus metrics, read at the scrape from where they are counted: no scrape, no cost."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from sluice.telemetry.histogram import Histogram

Labels = tuple[str, ...]
Values = float | Mapping[Any, float]
"""One number, or numbers by label values: a string for a single label, else a tuple."""


def counter(name: str, text: str, values: Values, labels: Labels = ()) -> Metric:
    """`name` without its _total."""
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def gauge(name: str, text: str, values: Values, labels: Labels = ()) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def histogram(name: str, text: str, found: Histogram) -> Metric:
    at_most, buckets = 0, []
    for bound, count in zip((*map(str, found.bounds), "+Inf"), list(found.counts), strict=True):
        at_most += count
        buckets.append((bound, at_most))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=found.total)


class _Reader:
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield from self._read()


def registry_of(read: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """The process's metrics, and those that `read` yields at each scrape, in the thread of the scrape."""
    registry = CollectorRegistry()
    registry.register(_Reader(read))
    ProcessCollector(registry=registry)
    return registry


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    if isinstance(values, Mapping):
        # A copy, because other threads go on counting.
        for labels, value in dict(values).items():
            family.add_metric((labels,) if isinstance(labels, str) else labels, value)
    else:
        family.add_metric((), values)
    return family
