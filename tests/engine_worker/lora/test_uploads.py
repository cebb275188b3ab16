"""Uploads without room: few are kept, the others are asked for again, one at a time and in order."""

from typing import NamedTuple

import pytest

from engine_worker.lora.host import HostAdapters
from engine_worker.lora.uploads import ASK_SECONDS, MAX_DROPPED, WaitingUploads
from tests.fakes.clock import Clock


class Weights(NamedTuple):
    nbytes: int


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def uploads(clock):
    found = WaitingUploads(1, clock)
    for version, size in (("kept", 3), ("b", 6), ("c", 2), ("d", 2)):
        found.add(version, Weights(size))
    return found


def left(uploads):
    return [version for version in ("kept", "b", "c", "d") if version in uploads]


def test_the_first_is_stored_once_there_is_room(uploads):
    host = HostAdapters(4)
    host.add("used", Weights(4))
    host.acquire("used")
    uploads.store(host)
    assert left(uploads) == ["kept", "b", "c", "d"]
    host.release("used")
    uploads.store(host)
    assert host.versions == ["kept"]
    assert left(uploads) == ["b", "c", "d"]


def test_others_are_asked_for_in_the_order_of_their_requests_one_at_a_time(uploads, clock):
    uploads.store(HostAdapters(10))
    for _ in range(3):
        uploads.ask_again(["c", "b", "d"], 10)
    assert left(uploads) == ["b", "d"]
    uploads.on_read("c")
    uploads.ask_again(["b", "d"], 10)
    assert left(uploads) == ["d"]
    # Its router has died, say.
    clock.now += ASK_SECONDS
    uploads.ask_again(["d"], 10)
    assert left(uploads) == []


@pytest.mark.parametrize(("room", "found"), [(9, ["kept", "c", "d"]), (8, ["kept", "b", "c", "d"])])
def test_none_passes_a_larger_one_before_it_nor_those_that_are_kept(uploads, room, found):
    uploads.ask_again(["b", "c"], room)
    assert left(uploads) == found


def test_those_that_no_request_waits_for_hold_up_nobody(uploads):
    uploads.store(HostAdapters(10))
    uploads.ask_again(["d"], 2)
    assert left(uploads) == ["b", "c"]


def test_as_many_are_remembered_as_the_limit_says(clock):
    uploads = WaitingUploads(0, clock)
    for i in range(3 * MAX_DROPPED):
        uploads.add(str(i), Weights(1))
    assert sum(str(i) in uploads for i in range(3 * MAX_DROPPED)) == MAX_DROPPED
