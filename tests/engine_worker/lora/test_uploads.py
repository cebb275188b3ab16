"""Uploads without room in host memory: few are kept, the others are requested again, one at a time and in order."""

from typing import NamedTuple

import pytest

from engine_worker.lora.host import MAX_REMEMBERED, RETURN_SECONDS, HostAdapters, WaitingUploads
from tests.fakes.clock import Clock


class Weights(NamedTuple):
    nbytes: int


SIZES = {"kept": 3, "b": 6, "c": 2, "d": 2}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def host():
    """Host memory that is filled by an adapter in use."""
    adapters = HostAdapters(10)
    adapters.add("used", Weights(10))
    adapters.acquire("used")
    return adapters


@pytest.fixture
def uploads(host, clock):
    waiting_uploads = WaitingUploads(host, 1, clock)
    for version, size in SIZES.items():
        waiting_uploads.add(version, Weights(size))
    return waiting_uploads


def waiting(uploads):
    return [version for version in SIZES if version in uploads]


def submit_again(uploads, host, version):
    """The router sends the files, then submits the request again."""
    uploads.on_refused(version)
    assert host.add(version, Weights(SIZES[version]))
    uploads.on_stored(version)
    uploads.on_request(version)


def test_the_kept_upload_is_stored_once_there_is_room(uploads, host):
    uploads.advance([])
    assert waiting(uploads) == ["kept", "b", "c", "d"]
    host.release("used")
    uploads.advance([])
    assert list(host._adapters) == ["kept"]
    assert waiting(uploads) == ["b", "c", "d"]


def test_dropped_uploads_are_requested_one_at_a_time_in_the_order_of_requests(uploads, host, clock):
    host.release("used")
    uploads.advance(["c", "b", "d"])
    assert waiting(uploads) == ["b", "d"]
    uploads.on_refused("c")
    for _ in range(3):
        uploads.advance(["b", "d"])
    assert waiting(uploads) == ["b", "d"]
    submit_again(uploads, host, "c")
    uploads.advance(["b", "d"])
    assert waiting(uploads) == ["d"]
    # Its request is not submitted again, as if the router had died.
    uploads.on_refused("b")
    clock.now += RETURN_SECONDS
    uploads.advance(["d"])
    assert waiting(uploads) == []


@pytest.mark.parametrize(("in_use", "still_waiting"), [(1, ["c", "d"]), (5, ["b", "c", "d"])])
def test_a_small_upload_does_not_overtake_a_larger_one(uploads, host, in_use, still_waiting):
    host.release("used")
    host.add("other", Weights(in_use))
    host.acquire("other")
    uploads.advance(["b", "c"])
    assert waiting(uploads) == still_waiting


def test_kept_uploads_come_first(uploads, host):
    host.release("used")
    host.add("other", Weights(8))
    host.acquire("other")
    # There is room for c, but not for both.
    uploads.advance(["c"])
    assert waiting(uploads) == ["kept", "b", "c", "d"]


def test_uploads_without_a_waiting_request_delay_no_others(uploads, host):
    host.release("used")
    uploads.advance(["d"])
    assert waiting(uploads) == ["b", "c"]


def test_files_from_a_router_stay_until_the_request_arrives(uploads, host, clock):
    host.release("used")
    uploads.on_refused("b")
    host.add("b", Weights(SIZES["b"]))
    uploads.on_stored("b")
    assert not host.add("large", Weights(9))
    assert not host.remove("b")
    uploads.on_request("b")
    assert host.remove("b")
    # Or until the request is no longer expected.
    uploads.on_refused("d")
    host.add("d", Weights(SIZES["d"]))
    uploads.on_stored("d")
    clock.now += RETURN_SECONDS
    uploads.advance([])
    assert host.remove("d")


def test_the_number_of_remembered_versions_is_limited(host, clock):
    uploads = WaitingUploads(host, 0, clock)
    for i in range(3 * MAX_REMEMBERED):
        uploads.add(str(i), Weights(1))
        uploads.on_refused(str(i))
    assert sum(str(i) in uploads for i in range(3 * MAX_REMEMBERED)) == MAX_REMEMBERED
    assert len(uploads._returning) == MAX_REMEMBERED
