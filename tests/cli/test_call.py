"""`sluice call`."""

import json

import pytest

from sluice.v1 import admin_pb2


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
