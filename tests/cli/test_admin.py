"""`sluice call`, `sluice cache-events` and `sluice serving-version`."""

import json

import grpc
import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure
from tests.fakes.server import serve
from tests.fakes.server_script import Script


def test_a_line_for_each_rank(sluice, script) -> None:
    script.rank_answers = [
        admin_pb2.RankAnswer(engine_id="engine-0", rank=rank, value_json='{"free": 1}') for rank in (0, 1)
    ]
    result = sluice("call", "memory")
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines == [{"engine": "engine-0", "rank": rank, "value": {"free": 1}} for rank in (0, 1)]


def test_errors_go_to_stderr(sluice, script) -> None:
    script.rank_answers = [
        admin_pb2.RankAnswer(engine_id="engine-0", rank=0, value_json="1"),
        admin_pb2.RankAnswer(engine_id="engine-0", rank=1, error="engine-0, rank 1, m: no"),
    ]
    result = sluice("call", "m")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 1
    assert "engine-0, rank 1, m: no" in result.stderr


@pytest.mark.parametrize(("option", "args", "kwargs"), [("[1, 2]", "[1, 2]", "{}"), ('{"k": 1}', "[]", '{"k": 1}')])
def test_arguments(sluice, script, option, args, kwargs) -> None:
    assert sluice("call", "m", "--args", option).exit_code == 0
    assert (script.seen[-1].args_json, script.seen[-1].kwargs_json) == (args, kwargs)


@pytest.mark.parametrize("option", ["[", "1"])
def test_invalid_arguments_are_refused(sluice, script, option) -> None:
    result = sluice("call", "m", "--args", option)
    assert result.exit_code == 1
    assert "--args" in result.stderr
    assert not script.seen


@pytest.mark.parametrize("engine", ["", "engine-0"])
def test_a_line_for_each_event(sluice, script, monkeypatch, engine) -> None:
    events = [
        admin_pb2.CacheEvent(event_id=7, dropped=7, removed=admin_pb2.CacheRemoved(block_hashes=[1, 2**64 - 1])),
        admin_pb2.CacheEvent(event_id=8, created=admin_pb2.CacheCreated(device_blocks=3)),
    ]
    script.cache_events = [admin_pb2.StreamCacheEventsResponse(engine_id="engine-0", events=events)]
    # Makes the server end the stream, which would otherwise continue.
    monkeypatch.setattr("tests.fakes.server.FakeServer._wait_for_the_end", lambda *_: None)
    result = sluice("cache-events", *(["--engine", engine] if engine else []))
    assert result.exit_code == 0
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {
            "engine": "engine-0",
            "event_id": "7",
            "dropped": "7",
            "removed": {"block_hashes": ["1", "18446744073709551615"]},
        },
        {"engine": "engine-0", "event_id": "8", "created": {"device_blocks": 3}},
    ]
    assert script.seen[-1].engine_id == engine


def test_an_error_is_one_line(sluice, script) -> None:
    script.failure = Failure(grpc.StatusCode.INVALID_ARGUMENT, "engine_id: kv_event_buffer is 0")
    result = sluice("cache-events")
    assert result.exit_code == 1
    assert "kv_event_buffer is 0" in result.stderr


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
