"""The services of a ring and their command lines."""

from pathlib import Path

import pytest

from sluice.launch import OptionsError, Plan
from sluice.launch.environment import remote_environment
from sluice.launch.plan import services


def flag(command: list[str], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


def test_services_use_consecutive_ports() -> None:
    plan = Plan("model", "name", routers=2, engines=2, detokenizers=1, port=7000, metrics_port=7002)
    commands = {each.name: each.command for each in services(plan, Path("/x"))}
    assert [flag(commands[f"router-{i}"], "--port") for i in range(2)] == ["7000", "7001"]
    names = ("router-0", "router-1", "engine-0", "engine-1", "detok-0")
    assert [flag(commands[name], "--metrics-port") for name in names] == ["7002", "7003", "7004", "7005", "7006"]


def test_routers_use_consecutive_admin_ports() -> None:
    for admin_port, expected in ((7500, ["7500", "7501"]), (0, ["0", "0"])):
        plan = Plan("model", "name", routers=2, router_args={"admin_port": admin_port})
        routers = [each for each in services(plan, Path("/x")) if each.role == "router"]
        assert [flag(each.command, "--admin-port") for each in routers] == expected
    with pytest.raises(OptionsError, match="port and admin_port: port 7001 is in both ranges"):
        Plan("model", "name", routers=2, port=7000, router_args={"admin_port": 7001})


def test_a_router_can_be_moved_to_a_port() -> None:
    (router,) = (each for each in services(Plan("model", "name"), Path("/x")) if each.role == "router")
    assert flag(router.command, "--port") == "0"
    assert flag(router.on_port(7005).command, "--port") == "7005"
    assert flag(router.command, "--metrics-port") is None


def test_a_service_can_have_its_own_drain_timeout() -> None:
    plan = Plan("model", "name", drain_timeout=3, engine_args={"drain_timeout": 60})
    assert {each.name: each.drain_timeout for each in services(plan, Path("/x"))} == {
        "engine-0": 60,
        "detok-0": 3,
        "detok-1": 3,
        "router": 3,
    }


def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/host/test_cores.py tests the quota of a container."""
    monkeypatch.setattr("sluice.launch.plan.usable_cores", lambda: 5)
    for engines, threads in ((1, "5"), (2, "2"), (6, "1")):
        engine_services = [
            each for each in services(Plan("model", "name", engines=engines), Path("/x")) if each.role == "engine"
        ]
        assert [flag(each.command, "--default-threads") for each in engine_services] == [threads] * engines


def test_services_on_other_machines_get_the_launchers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_on = {"SLUICE_ROUTER_TOKENS_FILE": "/tokens", "SLUICE_ENGINE_TENSOR_PARALLEL": "4", "NCCL_DEBUG": "INFO"}
    for name, value in (passed_on | {"HF_TOKEN": "secret", "SLUICE_PARENT_PID": "1", "HOME": "/root"}).items():
        monkeypatch.setenv(name, value)
    environment = remote_environment()
    assert passed_on.items() <= environment.items()
    assert not environment.keys() & {"HF_TOKEN", "SLUICE_PARENT_PID", "HOME"}


def test_a_gateway_has_the_routers_addresses_and_listens_like_them():
    router_args = {"insecure": True, "tokens_file": "t"}
    plan = Plan(
        "model", "name", host="0.0.0.0", routers=2, port=7000, http_port=8000, metrics_port=9000,
        router_args=router_args, shared_args={"log_level": "debug", "insecure_ring": True},
        gateway_args={"tool_parser": "hermes"},
    )  # fmt: skip
    (gateway,) = services(plan, Path("/x"))[-1:]
    settings = gateway.settings({})
    assert (gateway.name, settings.routers) == ("gateway", ("127.0.0.1:7000", "127.0.0.1:7001"))
    assert (settings.host, settings.port, settings.insecure, settings.log_level) == ("0.0.0.0", 8000, True, "debug")
    assert (settings.metrics_port, settings.tool_parser) == (9005, "hermes")
    assert "gateway" not in {each.name for each in services(Plan("model", "name"), Path("/x"))}
    (ipv6,) = services(
        Plan("model", "name", host="::", port=7000, http_port=8000, router_args=router_args), Path("/x")
    )[-1:]
    assert ipv6.settings({}).routers == ("[::1]:7000",)


def test_gateways_share_their_port_and_have_metrics_ports_of_their_own():
    plan = Plan("model", "name", port=7000, http_port=8000, gateways=2, metrics_port=9000)
    gateways = [each for each in services(plan, Path("/x")) if each.role == "gateway"]
    settings = [each.settings({}) for each in gateways]
    assert [each.name for each in gateways] == [each.id for each in settings] == ["gateway-0", "gateway-1"]
    assert [(each.port, each.metrics_port) for each in settings] == [(8000, 9004), (8000, 9005)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"http_port": 8000}, "http_port needs a fixed port"),
        ({"gateways": 2}, "gateways: 2 gateways need an http_port"),
        ({"gateways": 0}, "gateways must be at least 1"),
        ({"http_port": 8000, "port": 7000, "gateways": 2, "metrics_port": 7999}, "metrics_port and http_port"),
        ({"http_port": 7000, "port": 7000}, "port and http_port: port 7000 is in both"),
        (
            {"http_port": 8000, "port": 7000, "router_args": {"tls_certificate": "c", "tls_key": "k"}},
            "add --set gateway.router_ca=FILE",
        ),
    ],
)
def test_invalid_options_of_a_gateway_are_refused(options, message):
    with pytest.raises(OptionsError, match=message):
        services(Plan("model", "name", **options), Path("/x"))
