"""Prometheus metrics. Values are read from their sources at each scrape, so that they cost nothing in between."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from sluice.telemetry.measures import Histogram

Labels = tuple[str, ...]
Values = float | Mapping[Any, float]
"""One number, or numbers by label value: a string for a single label, a tuple for several."""


def counter(name: str, text: str, values: Values, labels: Labels = ()) -> Metric:
    """`name` without the suffix _total."""
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def gauge(name: str, text: str, values: Values, labels: Labels = ()) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def histogram(name: str, text: str, values: Histogram) -> Metric:
    cumulative, buckets = 0, []
    for bound, count in zip((*map(str, values.bounds), "+Inf"), list(values.counts), strict=True):
        cumulative += count
        buckets.append((bound, cumulative))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=values.total)


class _Reader:
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield from self._read()


def registry_of(read: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """A registry with the process's metrics and those that `read` yields at each scrape. `read` is called in the thread
    of the scrape."""
    registry = CollectorRegistry()
    registry.register(_Reader(read))
    ProcessCollector(registry=registry)
    return registry


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    if isinstance(values, Mapping):
        # A copy, because other threads may change the mapping meanwhile.
        for labels, value in dict(values).items():
            family.add_metric((labels,) if isinstance(labels, str) else labels, value)
    else:
        family.add_metric((), values)
    return family
