"""`sluice serving-version`."""

import grpc
import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.v1 import admin_pb2
from tests.fakes.server import Failure, Script, serve


def test_without_an_argument_it_is_shown(sluice, script, address) -> None:
    script.info.serving_version, script.info.serving_engines = "v1", 4
    result = sluice("serving-version")
    assert (result.exit_code, result.stdout) == (0, f"{address}: v1, 4 engines\n")
    assert script.seen == [admin_pb2.GetServerInfoRequest()]


def test_no_version_is_any(sluice, script, address) -> None:
    script.info.serving_engines = 1
    assert sluice("serving-version").stdout == f"{address}: any, 1 engine\n"


def test_a_version_without_engines_stands_out(sluice, script) -> None:
    script.info.serving_version = "v1"
    assert "v1, 0 engines that take work: new requests go to other versions" in sluice("serving-version").stdout


def test_every_router_is_told(sluice, script, address) -> None:
    script.info.serving_version, script.info.serving_engines = "v1", 2
    other = Script()
    other.info.serving_engines = 3
    with serve(other) as second:
        result = sluice("serving-version", "v2", "--address", f"{address},{second}", "--token", "secret")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [f"{address}: v2 (was v1), 2 engines", f"{second}: v2 (was any), 3 engines"]
    for told in (script, other):
        assert told.seen == [admin_pb2.SetServingVersionRequest(version="v2")]
        assert told.metadata[0]["authorization"] == "Bearer secret"


def test_back_to_any(sluice, script, address) -> None:
    script.info.serving_version, script.info.serving_engines = "v2", 5
    assert sluice("serving-version", "--any").stdout == f"{address}: any (was v2), 5 engines\n"
    assert script.seen == [admin_pb2.SetServingVersionRequest()]


def test_a_router_that_refuses_is_named_and_the_others_change(sluice, script, address) -> None:
    message = "version is 'v9', must be one of 'v1'"
    with serve(Script(failure=Failure(grpc.StatusCode.NOT_FOUND, message))) as second:
        result = sluice("serving-version", "v9", "--address", f"{second},{address}")
    assert result.exit_code == 1
    assert result.stderr == f"error: {second}: {message}\n"
    assert result.stdout == f"{address}: v9 (was any), 0 engines that take work: new requests go to other versions\n"


def test_a_router_that_is_gone_is_named(script, address) -> None:
    gone = "127.0.0.1:1"
    result = CliRunner().invoke(app, ["serving-version", "v2", "--address", f"{gone},{address}"])
    assert result.exit_code == 1
    assert f"error: {gone}: no Sluice server answers at {gone}" in result.stderr
    assert script.info.serving_version == "v2"


@pytest.mark.parametrize("given", [[""], ["v1", "--any"], ["", "--any"]])
def test_what_is_no_version(sluice, script, given) -> None:
    result = sluice("serving-version", *given)
    assert result.exit_code == 1
    assert f"VERSION is {given[0]!r}, must be a version, or --any without one" in result.stderr
    assert not script.seen
