"""`sluice cache-events`."""

import json

import grpc
import pytest

from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure


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
