"""Traces of a real ring. Its collector is set by OpenTelemetry's environment variable."""

import os
import signal
from pathlib import Path

import pytest

from sluice import Client
from sluice.launch import Ring
from tests.fakes.collector import attributes, collect
from tests.fakes.gate import TOKENS, VARIABLE
from tests.fakes.processes import wait_until

PHASES = ["queue", "prefill", "decode", "detokenize"]


@pytest.fixture(scope="module")
def collector():
    with collect() as collector:
        yield collector


@pytest.fixture(scope="module")
def opening(tmp_path_factory) -> Path:
    """The file that opens the gate."""
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def ring(collector, opening):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        patch.setenv(VARIABLE, str(opening))
        ring = Ring(engines=2, detokenizers=1, engine_args={"logits_processors": {"gate": "tests.fakes.gate:gate"}})
        ring.start()
    try:
        yield ring
        ring.stop()
    finally:
        ring.kill()


def family(collector, request_id):
    """Wait for the request's span. Returns it and its children."""

    def roots():
        return [span for span in collector.spans if attributes(span).get("gen_ai.response.id") == request_id]

    assert wait_until(roots)
    (root,) = roots()
    return root, collector.tree(root.trace_id.hex())[root.span_id.hex()]


@pytest.mark.long
def test_spans_of_phases_have_the_durations_that_the_engine_reports(ring, collector):
    with Client(ring.address) as client:
        options = {"max_tokens": 50, "ignore_eos": True, "timings": True}
        timings = client.generate(list(range(40)), request_id="traced", **options).timings
    root, children = family(collector, "traced")
    assert [span.name for span in children] == PHASES
    seconds = {span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in children}
    assert all(length >= 0 for length in seconds.values())
    assert seconds["prefill"] == pytest.approx(timings.prefill, abs=1e-4)
    assert seconds["decode"] == pytest.approx(timings.decode, abs=1e-4)
    assert min(timings.prefill, timings.decode) > 0
    assert sum(seconds.values()) <= (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9 + 1e-6
    assert attributes(root)["gen_ai.usage.output_tokens"] == 50


def test_both_attempts_are_traced_when_an_engine_dies(ring, collector, opening):
    options = {"max_tokens": 2 * TOKENS, "ignore_eos": True, "logits_processors": ["gate"]}
    with Client(ring.address) as client, client.stream([1, 2], request_id="moved", **options) as stream:
        chunks = iter(stream)
        next(chunks)
        (victim,) = (request.engine_id for request in client.stats().requests if request.request_id == "moved")
        os.kill(ring.pids[victim], signal.SIGKILL)
        opening.touch()
        assert sum(1 for _ in chunks) > 0
    root, children = family(collector, "moved")
    assert [span.name for span in children] == [*PHASES, "attempt", "attempt"]
    lost, last = children[-2:]
    assert (attributes(lost)["sluice.engine"], lost.status.message) == (victim, "ENGINE_LOST")
    assert 0 < attributes(lost)["sluice.received_tokens"] < 2 * TOKENS
    assert attributes(last)["sluice.engine"] in {"engine-0", "engine-1"} - {victim}
    (recovery,) = root.events
    assert recovery.name == "recovery"
    assert root.start_time_unix_nano < lost.start_time_unix_nano < lost.end_time_unix_nano
    assert lost.end_time_unix_nano == recovery.time_unix_nano <= last.start_time_unix_nano
    assert last.start_time_unix_nano < last.end_time_unix_nano <= root.end_time_unix_nano
    assert (root.status.code, last.status.code) == (0, 0)
    assert attributes(root)["sluice.attempts"] == 2
    assert attributes(root)["gen_ai.usage.output_tokens"] == 2 * TOKENS
