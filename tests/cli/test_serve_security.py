"""Options of `sluice serve` for TLS, tokens and AdminService become the router's settings."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.launch.plan import Plan, services
from sluice.settings.read import load_settings
from sluice.settings.services import RouterSettings


@pytest.fixture
def router_settings(ring_options):
    """Returns the settings of the router for arguments of `sluice serve`."""

    def read(*arguments: str) -> RouterSettings:
        options = ring_options(*arguments)
        plan = Plan(model="model", name="name", host=options["host"], router_args=options["router_args"])
        (router,) = (service for service in services(plan, Path("folder")) if service.role == "router")
        return load_settings(RouterSettings, router.command[router.command.index("router") + 1 :])

    return read


def test_tls_and_tokens(router_settings):
    router_args = {
        "tls_certificate": "c.pem",
        "tls_key": "k.pem",
        "tls_client_ca": "a.pem",
        "tokens_file": "tokens",
        "admin_tokens_file": "admins",
    }
    flags = [part for name, value in router_args.items() for part in ("--set", f"router.{name}={value}")]
    settings = router_settings("--host", "0.0.0.0", "--admin-port", "50052", *flags)
    assert {name: getattr(settings, name) for name in router_args} == router_args
    assert (settings.host, settings.admin_port, settings.insecure) == ("0.0.0.0", 50052, False)


def test_insecure_must_be_explicit(router_settings):
    assert router_settings("--host", "0.0.0.0", "--insecure").insecure
    assert not router_settings().insecure
    with pytest.raises(SystemExit, match="can be reached from other machines"):
        router_settings("--host", "0.0.0.0")


def test_a_demo_with_tokens_is_refused():
    result = CliRunner().invoke(app, ["serve", "--demo", "def", "--tokens-file", "tokens"])
    assert result.exit_code == 1
    assert "--demo" in result.output
