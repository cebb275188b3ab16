"""Traces of a real ring, whose collector is named by OpenTelemetry's own variable."""

import pytest

from sluice import Client
from sluice.launch import Ring
from tests.fakes.collector import attributes, collect
from tests.fakes.processes import wait_until


@pytest.fixture(scope="module")
def collector():
    with collect() as found:
        yield found


@pytest.fixture(scope="module")
def ring(collector):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        ring = Ring(engines=1, detokenizers=1)
        ring.start()
    try:
        yield ring
        ring.stop()
    finally:
        ring.kill()


def test_phases_have_the_engines_times(ring, collector):
    with Client(ring.address) as client:
        given = {"max_tokens": 50, "ignore_eos": True, "timings": True}
        timings = client.generate(list(range(40)), request_id="traced", **given).timings
    assert wait_until(lambda: any(attributes(span).get("gen_ai.response.id") == "traced" for span in collector.spans))
    (root,) = (span for span in collector.spans if attributes(span).get("gen_ai.response.id") == "traced")
    children = collector.tree(root.trace_id.hex())[root.span_id.hex()]
    assert [span.name for span in children] == ["queue", "prefill", "decode", "detokenize"]
    seconds = {span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in children}
    assert all(length >= 0 for length in seconds.values())
    assert seconds["prefill"] == pytest.approx(timings.prefill, abs=1e-4)
    assert seconds["decode"] == pytest.approx(timings.decode, abs=1e-4)
    assert min(timings.prefill, timings.decode) > 0
    assert sum(seconds.values()) <= (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9 + 1e-6
    assert attributes(root)["gen_ai.usage.output_tokens"] == 50
