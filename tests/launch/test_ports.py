"""The ports that a ring will listen on."""

from dataclasses import replace
from pathlib import Path

import pytest

from sluice.host.ports import Port
from sluice.launch import OptionsError
from sluice.launch.plan import Plan, services


def listed(environment: dict[str, str], **options) -> list[Port]:
    plan = Plan(model="m", name="n", **options)
    planned = services(plan, Path("/f"))
    listened = [(each.name, port) for each in planned for port in each.settings(environment).ports]
    return [replace(port, owner=name) for name, port in listened if port.number]


def test_ports_of_all_routers_and_of_all_metrics() -> None:
    ports = listed({}, routers=2, port=6000, host="::1", metrics_port=7000, router_args={"admin_port": 8000})
    assert ports == [
        Port("metrics_port", "127.0.0.1", 7002, "engine-0"),
        Port("metrics_port", "127.0.0.1", 7003, "detok-0"),
        Port("metrics_port", "127.0.0.1", 7004, "detok-1"),
        Port("port", "::1", 6000, "router-0"),
        Port("admin_port", "127.0.0.1", 8000, "router-0"),
        Port("metrics_port", "127.0.0.1", 7000, "router-0"),
        Port("port", "::1", 6001, "router-1"),
        Port("admin_port", "127.0.0.1", 8001, "router-1"),
        Port("metrics_port", "127.0.0.1", 7001, "router-1"),
    ]


def test_ports_and_hosts_from_the_environment() -> None:
    environment = {"SLUICE_ROUTER_ADMIN_PORT": "8000", "SLUICE_ROUTER_ADMIN_HOST": "::1"}
    environment |= {"SLUICE_ENGINE_METRICS_HOST": "0.0.0.0"}
    ports = listed(environment, port=6000, metrics_port=7000)
    assert Port("admin_port", "::1", 8000, "router") in ports
    assert Port("metrics_port", "0.0.0.0", 7001, "engine-0") in ports
    assert Port("metrics_port", "127.0.0.1", 7002, "detok-0") in ports


def test_any_port_and_an_invalid_port() -> None:
    assert listed({}, port=0) == []
    with pytest.raises(OptionsError, match="router: admin_port: must be a valid integer"):
        listed({"SLUICE_ROUTER_ADMIN_PORT": "many"})
