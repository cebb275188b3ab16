"""`sluice serving-version`."""

import grpc
import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure
from tests.fakes.server import serve
from tests.fakes.server_script import Script


def test_without_an_argument_the_version_is_shown(sluice, script, address) -> None:
    script.info.serving_version, script.info.serving_engines = "v1", 4
    result = sluice("serving-version")
    assert (result.exit_code, result.stdout) == (0, f"{address}: v1, 4 engines\n")
    assert script.seen == [admin_pb2.GetServerInfoRequest()]


def test_an_unset_version_is_shown_as_any(sluice, script, address) -> None:
    script.info.serving_engines = 1
    assert sluice("serving-version").stdout == f"{address}: any, 1 engine\n"


def test_a_version_without_engines_is_pointed_out(sluice, script) -> None:
    script.info.serving_version = "v1"
    assert "v1, 0 engines that accept work: new requests go to other versions" in sluice("serving-version").stdout


def test_every_router_is_changed(sluice, script, address) -> None:
    script.info.serving_version, script.info.serving_engines = "v1", 2
    second_script = Script()
    second_script.info.serving_engines = 3
    with serve(second_script) as second_address:
        result = sluice("serving-version", "v2", "--address", f"{address},{second_address}", "--token", "secret")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{address}: v2 (was v1), 2 engines",
        f"{second_address}: v2 (was any), 3 engines",
    ]
    for router in (script, second_script):
        assert router.seen == [admin_pb2.SetServingVersionRequest(version="v2")]
        assert router.metadata[0]["authorization"] == "Bearer secret"


def test_any_resets_the_version(sluice, script, address) -> None:
    script.info.serving_version, script.info.serving_engines = "v2", 5
    assert sluice("serving-version", "--any").stdout == f"{address}: any (was v2), 5 engines\n"
    assert script.seen == [admin_pb2.SetServingVersionRequest()]


def test_a_router_that_refuses_is_named_and_the_others_change(sluice, script, address) -> None:
    message = "version is 'v9', must be one of 'v1'"
    with serve(Script(failure=Failure(grpc.StatusCode.NOT_FOUND, message))) as second_address:
        result = sluice("serving-version", "v9", "--address", f"{second_address},{address}")
    assert result.exit_code == 1
    assert result.stderr == f"error: {second_address}: {message}\n"
    assert result.stdout == f"{address}: v9 (was any), 0 engines that accept work: new requests go to other versions\n"


def test_an_unreachable_router_is_named(script, address) -> None:
    unreachable = "127.0.0.1:1"
    result = CliRunner().invoke(app, ["serving-version", "v2", "--address", f"{unreachable},{address}"])
    assert result.exit_code == 1
    assert f"error: no Sluice server answers at {unreachable}" in result.stderr
    assert script.info.serving_version == "v2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "VERSION must not be empty"),
        (["", "--any"], "VERSION must not be empty"),
        (["v1", "--any"], "VERSION and --any cannot be combined (got 'v1')"),
    ],
)
def test_invalid_versions_are_refused(sluice, script, arguments, message) -> None:
    result = sluice("serving-version", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not script.seen
