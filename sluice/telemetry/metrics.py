"""Prometheus metrics: read where they are counted, when somebody asks.

A service hands over a function that describes all it counts; nothing is counted twice, and what nobody scrapes costs
nothing. `sluice.telemetry.server` serves them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from sluice.telemetry.histogram import Histogram

Labels = tuple[str, ...]
Values = float | Mapping[Any, float]
"""One number, or numbers by the values of the labels: a string where there is one label, else a tuple."""


def counter(name: str, text: str, values: Values, labels: Labels = ()) -> Metric:
    """Something that only grows; `name` is without its _total."""
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def gauge(name: str, text: str, values: Values, labels: Labels = ()) -> Metric:
    """Something that goes up and down."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def histogram(name: str, text: str, found: Histogram) -> Metric:
    """A distribution."""
    at_most, buckets = 0, []
    for bound, count in zip((*map(str, found.bounds), "+Inf"), list(found.counts), strict=True):
        at_most += count
        buckets.append((bound, at_most))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=found.total)


class _Reader:
    """A collector of prometheus_client. It does not describe itself before it is asked."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield from self._read()

    def describe(self) -> Iterable[Metric]:
        return ()


def registry_of(read: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """A registry of what `read` gives at each scrape, in the thread of the scrape, and of the process."""
    registry = CollectorRegistry()
    registry.register(_Reader(read))
    ProcessCollector(registry=registry)
    return registry


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    if isinstance(values, Mapping):
        # Other threads count on: a copy is made at once.
        for labels, value in dict(values).items():
            family.add_metric((labels,) if isinstance(labels, str) else labels, value)
    else:
        family.add_metric((), values)
    return family
