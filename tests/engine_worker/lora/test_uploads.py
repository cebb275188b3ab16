"""Uploads without room: few are kept, the others are asked for again, one at a time and in order."""

from typing import NamedTuple

import pytest

from engine_worker.lora.host import HostAdapters
from engine_worker.lora.uploads import MAX_REMEMBERED, RETURN_SECONDS, WaitingUploads
from tests.fakes.clock import Clock


class Weights(NamedTuple):
    nbytes: int


SIZES = {"kept": 3, "b": 6, "c": 2, "d": 2}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def host():
    """Full."""
    found = HostAdapters(10)
    found.add("used", Weights(10))
    found.acquire("used")
    return found


@pytest.fixture
def uploads(host, clock):
    found = WaitingUploads(host, 1, clock)
    for version, size in SIZES.items():
        found.add(version, Weights(size))
    return found


def left(uploads):
    return [version for version in SIZES if version in uploads]


def come_back(uploads, host, version):
    """The files, then the request."""
    uploads.on_refused(version)
    assert host.add(version, Weights(SIZES[version]))
    uploads.on_stored(version)
    uploads.on_request(version)


def test_the_first_is_stored_once_there_is_room(uploads, host):
    uploads.advance([])
    assert left(uploads) == ["kept", "b", "c", "d"]
    host.release("used")
    uploads.advance([])
    assert host.versions == ["kept"]
    assert left(uploads) == ["b", "c", "d"]


def test_others_are_asked_for_in_the_order_of_their_requests_one_at_a_time(uploads, host, clock):
    host.release("used")
    uploads.advance(["c", "b", "d"])
    assert left(uploads) == ["b", "d"]
    uploads.on_refused("c")
    for _ in range(3):
        uploads.advance(["b", "d"])
    assert left(uploads) == ["b", "d"]
    come_back(uploads, host, "c")
    uploads.advance(["b", "d"])
    assert left(uploads) == ["d"]
    # Its router has died, say.
    uploads.on_refused("b")
    clock.now += RETURN_SECONDS
    uploads.advance(["d"])
    assert left(uploads) == []


@pytest.mark.parametrize(("in_use", "found"), [(1, ["c", "d"]), (5, ["b", "c", "d"])])
def test_none_passes_a_larger_one_before_it(uploads, host, in_use, found):
    host.release("used")
    host.add("other", Weights(in_use))
    host.acquire("other")
    uploads.advance(["b", "c"])
    assert left(uploads) == found


def test_those_that_are_kept_come_first(uploads, host):
    host.release("used")
    host.add("other", Weights(8))
    host.acquire("other")
    # There is room for the second one, not for both.
    uploads.advance(["c"])
    assert left(uploads) == ["kept", "b", "c", "d"]


def test_those_that_no_request_waits_for_hold_up_nobody(uploads, host):
    host.release("used")
    uploads.advance(["d"])
    assert left(uploads) == ["b", "c"]


def test_what_a_router_has_sent_stays_until_its_request_is_here(uploads, host, clock):
    host.release("used")
    uploads.on_refused("b")
    host.add("b", Weights(SIZES["b"]))
    uploads.on_stored("b")
    assert not host.add("large", Weights(9))
    assert not host.remove("b")
    uploads.on_request("b")
    assert host.remove("b")
    # Or until that does not come any more.
    uploads.on_refused("d")
    host.add("d", Weights(SIZES["d"]))
    uploads.on_stored("d")
    clock.now += RETURN_SECONDS
    uploads.advance([])
    assert host.remove("d")


def test_as_many_are_remembered_as_the_limit_says(host, clock):
    uploads = WaitingUploads(host, 0, clock)
    for i in range(3 * MAX_REMEMBERED):
        uploads.add(str(i), Weights(1))
        uploads.on_refused(str(i))
    assert sum(str(i) in uploads for i in range(3 * MAX_REMEMBERED)) == MAX_REMEMBERED
    assert len(uploads._returning) == MAX_REMEMBERED
