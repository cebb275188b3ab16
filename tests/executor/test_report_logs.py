"""The end of an executor's feeds: what was received before it is read first."""

import pytest

from sluice.client import NotImplementedByServer, SluiceError
from sluice.executor.report_logs import KVCacheEventLog, StepsLog
from sluice.v1 import admin_pb2 as pb


def steps():
    log = StepsLog(10)
    log.put(pb.StreamStepsResponse(steps=[pb.EngineStats(iteration=1)]))
    return log, log.take_steps


def requests():
    log = StepsLog(10)
    log.put(pb.StreamStepsResponse(requests=[pb.RequestStats(request_id="1")]))
    return log, log.take_requests


def cache_events():
    log = KVCacheEventLog()
    log.put(pb.StreamCacheEventsResponse(engine_id="e", engine_epoch=1, events=[pb.CacheEvent(event_id=0)]))
    return log, log.take


@pytest.fixture(params=[steps, requests, cache_events])
def feed(request):
    """A log with one unread report, and how to read it."""
    return request.param()


def test_after_an_error_the_rest_is_read_first(feed):
    log, read = feed
    log.fail(NotImplementedByServer("StreamSteps"))
    assert len(read(None)) == 1
    for _ in range(2):
        with pytest.raises(SluiceError, match="StreamSteps"):
            read(None)


def test_after_the_shutdown_the_rest_is_read_first(feed):
    log, read = feed
    log.close()
    assert len(read(None)) == 1
    with pytest.raises(RuntimeError, match="shut down"):
        read(None)


def test_no_report_within_the_timeout(feed):
    _, read = feed
    read(None)
    assert read(0.01) == []
