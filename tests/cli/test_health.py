"""`sluice health`."""

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse
from prometheus_client import CollectorRegistry

from sluice.telemetry.pages import Page, PortOwner
from sluice.telemetry.server import StatusServer
from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure
from tests.fakes.ports import free_ports


def test_serving(sluice, script) -> None:
    script.health["sluice.v1.GenerationService"] = HealthCheckResponse.SERVING
    script.stats.engines.add(
        engine_id="engine-0",
        scheduled_requests=3,
        max_batch_size=64,
        used_kv_blocks=10,
        max_kv_blocks=99,
        draining=True,
    )
    script.stats.detokenizers.add(detokenizer_id="detok-0", streams=5)
    result = sluice("health")
    assert result.exit_code == 0
    for expected in ("serves tiny", "engine-0", "3 of 64", "10 of 99", "draining", "detok-0", "not serving"):
        assert expected in result.stdout


def test_not_serving(sluice, script) -> None:
    script.health[""] = HealthCheckResponse.NOT_SERVING
    result = sluice("health")
    assert result.exit_code == 1
    assert "not serving" in result.stdout


@pytest.mark.parametrize(
    ("draining", "engines", "problem"),
    [
        (False, {}, "no engine accepts work: the router knows no engine"),
        (
            False,
            {"engine-0": admin_pb2.PEER_STATE_UNKNOWN, "engine-1": admin_pb2.PEER_STATE_STALLED},
            "no engine accepts work: engine-0 has not sent a heartbeat yet: it is loading or not running; "
            "engine-1 makes no progress",
        ),
        (True, {"engine-0": admin_pb2.PEER_STATE_SERVING}, "the router drains and accepts no new requests"),
    ],
)
def test_it_says_why_a_router_does_not_serve(sluice, script, draining, engines, problem) -> None:
    script.info.draining = draining
    for name, state in engines.items():
        script.info.engines.add(engine_id=name, state=state)
    stdout = sluice("health").stdout
    assert problem in stdout
    assert "no detokenizer accepts work: the router knows no detokenizer" in stdout
    script.info.detokenizers.add(detokenizer_id="detok-0", state=admin_pb2.PEER_STATE_SERVING)
    assert "no detokenizer" not in sluice("health").stdout


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED])
def test_statistics_that_are_refused_are_no_failure(sluice, script, code) -> None:
    script.no_stats = Failure(code, "on another port")
    result = sluice("health")
    assert result.exit_code == 0
    assert "serves tiny" in result.stdout
    assert "no statistics of engines and detokenizers: on another port" in result.stdout


class Ended:
    """The probes of a service that drains."""

    def dead(self) -> str | None:
        return None

    def not_ready(self) -> str | None:
        return "it is draining"


class Serving(Ended):
    def not_ready(self) -> str | None:
        return None


def test_gateways(sluice, script) -> None:
    def status(role: str, name: str, probes: Ended) -> StatusServer:
        return StatusServer(Page(CollectorRegistry(), probes, PortOwner(role, name)), "127.0.0.1", 0)

    servers = (
        status("gateway", "gateway-0", Serving()),
        status("gateway", "gateway-1", Ended()),
        status("engine", "engine-7", Serving()),
    )
    good, draining, engine = (f"127.0.0.1:{server.port}" for server in servers)
    try:
        result = sluice("health", "--gateways", good)
        assert (result.exit_code, "gateway-0" in result.stdout) == (0, True)
        gone = f"127.0.0.1:{free_ports(1)}"
        result = sluice("health", "--gateways", f"{good},{draining}, {engine},{gone}")
    finally:
        for server in servers:
            server.close()
    assert result.exit_code == 1
    shown = [line for line in result.stdout.splitlines() if "127.0.0.1" in line][1:]
    ends = ("serving", "it is draining", "another kind: engine", "Connection refused")
    assert len(shown) == len(ends)
    assert all(end in line for end, line in zip(ends, shown, strict=True))
