"""A ring starts and restarts at any log level, because readiness is a state and not a log line."""

import pytest

from sluice import Client
from sluice.launch import LogLine, Ring

ERRORS_ONLY = {"log_level": "error"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_ring_that_logs_only_errors_starts_and_restarts() -> None:
    lines: list[LogLine] = []
    options = {"engine_args": ERRORS_ONLY, "detokenizer_args": ERRORS_ONLY, "router_args": ERRORS_ONLY}
    with Ring(detokenizers=1, observe=lines.append, **options) as ring, Client(ring.address) as client:
        assert client.generate("def f(", max_tokens=2).outputs
        ring.restart("detok-0")
        assert client.generate("def f(", max_tokens=2).outputs
    assert [line.event for line in lines] == ["service_recovered"]
