"""The status that a service reports to its launcher."""

import time

import pytest

from sluice.telemetry.service_status import (
    STARTING,
    STATUS_VARIABLE,
    TOUCH_SECONDS,
    ProgressBeacon,
    ServiceStatus,
    StatusFile,
    StatusFileReader,
    StatusReader,
)
from tests.fakes.clock import Clock

READY = ServiceStatus("ready", "127.0.0.1:50051", peers={"engine-0": 1 << 62})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "router.status"


@pytest.fixture
def reader(path):
    return StatusReader(StatusFileReader(path))


@pytest.fixture
def writer(path):
    return StatusFile({STATUS_VARIABLE: str(path)})


def test_the_reader_returns_the_reported_status(reader, writer):
    reader.poll(1.0)
    assert (reader.status, reader.ran_at) == (STARTING, None)
    for now, status in ((2.0, READY), (3.0, ServiceStatus("draining", READY.address, 7))):
        writer.report(status)
        reader.poll(now)
        assert (reader.status, reader.ran_at) == (status, now)
    reader.poll(4.0)
    assert reader.ran_at == 3.0
    reader.reset()
    reader.poll(5.0)
    assert (reader.status, reader.ran_at) == (STARTING, None)


def test_the_same_status_is_written_once(path, writer):
    writer.report(READY)
    written = path.stat().st_ino
    writer.report(READY)
    assert path.stat().st_ino == written


def test_turns_of_the_loop_touch_the_file_at_most_once_per_interval(path, reader, writer):
    clock = Clock()
    beacon = ProgressBeacon(clock, writer)
    beacon.touch()
    assert not path.exists()
    writer.report(READY)
    first = path.stat().st_mtime_ns
    time.sleep(0.05)
    beacon.touch()
    assert path.stat().st_mtime_ns == first
    clock.now += TOUCH_SECONDS
    beacon.touch()
    assert path.stat().st_mtime_ns > first
    assert beacon.iterations == 3
    reader.poll(1.0)
    assert (reader.status, reader.ran_at) == (READY, 1.0)


def test_a_failed_write_is_retried(tmp_path):
    folder = tmp_path / "gone"
    path = folder / "router.status"
    reader, writer = StatusReader(StatusFileReader(path)), StatusFile({STATUS_VARIABLE: str(path)})
    writer.report(READY)
    folder.mkdir()
    writer.touch()
    reader.poll(1.0)
    assert reader.status == READY


def test_time_in_which_the_launcher_was_paused_is_excluded(reader, writer):
    reader.forgive(5.0, 9.0)
    assert reader.ran_at is None
    writer.report(READY)
    reader.poll(10.0)
    reader.forgive(5.0, 20.0)
    assert reader.ran_at == 15.0
    reader.forgive(50.0, 20.0)
    assert reader.ran_at == 20.0


def test_a_process_without_a_launcher_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = StatusFile({})
    assert not writer.in_use
    writer.report(READY)
    writer.touch()
    assert list(tmp_path.iterdir()) == []
