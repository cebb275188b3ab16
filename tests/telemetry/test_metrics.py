"""Metric families, histograms, and the server that exports them."""

import urllib.request
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sluice.telemetry.measures import Histogram
from sluice.telemetry.metrics import counter, gauge, histogram, registry_of
from tests.fakes.status import serve_metrics


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5))))
def test_a_histogram_counts_each_value_in_the_first_bucket_that_contains_it(values):
    distribution = Histogram((1, 2, 5))
    for value, times in values:
        distribution.observe(value, times)
    for i, bound in enumerate((1, 2, 5)):
        assert sum(distribution.counts[: i + 1]) == sum(times for value, times in values if value <= bound)
    assert sum(distribution.counts) == sum(times for _, times in values)
    assert distribution.total == pytest.approx(sum(value * times for value, times in values))


def test_a_scrape_returns_the_current_counts():
    events, sizes = Counter({"a": 1}), Histogram((0.5, 1))

    def read():
        yield counter("x_events", "Events.", events, ("kind",))
        yield gauge("x_pairs", "Pairs.", {("a", "b"): 7}, ("one", "other"))
        yield gauge("x_level", "Level.", 2.5)
        yield histogram("x_seconds", "Seconds.", sizes)

    server = serve_metrics(registry_of(read))
    try:
        assert scrape(server.port)["x_events_total", "a"] == 1
        events["a"] += 2
        events["b"] += 1
        sizes.observe(0.75, 3)
        samples = scrape(server.port)
    finally:
        server.close()
    assert (samples["x_events_total", "a"], samples["x_events_total", "b"]) == (3, 1)
    assert (samples["x_pairs", "a", "b"], samples["x_level",]) == (7, 2.5)
    assert [samples["x_seconds_bucket", le] for le in ("0.5", "1", "+Inf")] == [0, 3, 3]
    assert (samples["x_seconds_count",], samples["x_seconds_sum",]) == (3, 2.25)
    assert "process_cpu_seconds_total" in {name for name, *_ in samples}


def scrape(port: int) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
