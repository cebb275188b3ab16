"""gRPC connections leave the ring its file descriptors."""

from dataclasses import replace

import pytest
import structlog
from structlog.testing import capture_logs

from router.api.listener import fit_connections
from sluice.settings.services import RouterSettings


@pytest.mark.parametrize(("limit", "connections", "warnings"), [(100_000, 4096, 0), (4000, 3004, 1), (100, 1, 1)])
def test_connections_are_limited_to_the_descriptors_that_the_ring_does_not_need(limit, connections, warnings):
    settings = RouterSettings(model="m", engines=("ipc:///e",) * 100, detokenizers=("ipc:///d",) * 34)
    with capture_logs() as logs:
        fitted = fit_connections(settings, limit, structlog.get_logger())
    assert fitted.max_connections == connections
    assert [line["event"] for line in logs] == ["few_descriptors"] * warnings
    assert replace(fitted, max_connections=4096) == settings
