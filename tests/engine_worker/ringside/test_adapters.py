import msgspec
import pytest
import structlog
from msgspec.structs import replace

from engine_worker.ringside.adapters import KEPT_SECONDS, MAX_LOADING, MAX_UPLOADS, Adapters
from sluice.ring.adapters import (
    PART_BYTES,
    AdapterEntries,
    AdapterEntry,
    AdapterFiles,
    AdapterLoaded,
    LoadAdapter,
    parts_of,
)
from tests.fakes.library import FakeLibrary, files

EPOCH = 7
A, B = files("a"), files("b")


class Desk:
    def __init__(self, library: FakeLibrary | None) -> None:
        self.library = library
        self.sent: list[tuple[str, AdapterLoaded]] = []
        self.now = 1000.0
        self.adapters = Adapters(
            library, EPOCH, lambda *each: self.sent.append(each), structlog.get_logger(), lambda: self.now
        )

    def take(self, *messages) -> list[AdapterLoaded]:
        """Their answers."""
        for message in messages:
            # As it would come from the lane.
            self.adapters.on_message(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)))
        self.adapters.finish()
        answers, self.sent = [each for _, each in self.sent], []
        return answers


@pytest.fixture
def desk():
    return Desk(FakeLibrary())


def load(number=1, path="", version=None):
    return LoadAdapter(EPOCH, number, "router", path, version)


def named(name, files: AdapterFiles, at=1.0, removed=False):
    return AdapterEntries(EPOCH, [AdapterEntry(name, at, files.version, removed=removed)])


def test_a_folder_is_loaded_and_the_router_gets_its_version(desk):
    desk.library.folders["/a"] = A
    desk.library.polls = 2
    assert desk.take(load(5, "/a")) == []
    assert desk.adapters.pending
    assert desk.take() == [AdapterLoaded(EPOCH, 5, A.version, 8)]
    assert not desk.adapters.pending


def test_what_cannot_be_loaded_is_answered_with_the_reason(desk):
    (answer,) = desk.take(load(5, "/nowhere"))
    assert (answer.version, answer.fault.code, answer.fault.message) == (
        "",
        "INVALID_ARGUMENT",
        "/nowhere is not a folder",
    )


@pytest.mark.parametrize("size", [1, PART_BYTES, 2 * PART_BYTES + 1])
def test_uploaded_parts_are_joined_checked_and_loaded(desk, size):
    own = files("x", size)
    assert desk.take(*parts_of(own, EPOCH), load(1, version=own.version)) == [AdapterLoaded(EPOCH, 1, own.version, 8)]
    assert desk.library.host == {own.version: own}
    # Again: it is there.
    assert desk.take(load(2, version=own.version)) == [AdapterLoaded(EPOCH, 2, own.version, 8)]


def test_an_upload_with_a_hole_is_dropped_and_can_be_sent_again(desk):
    parts = list(parts_of(files("x", 3 * PART_BYTES), EPOCH))
    (answer,) = desk.take(parts[0], *parts[2:], load(1, version=parts[0].version))
    assert answer.fault.code == "ADAPTER_MISSING"
    assert not desk.library.host
    assert desk.take(*parts, load(2, version=parts[0].version))[0].version == parts[0].version


def test_two_routers_that_send_the_same_files_at_once(desk):
    """The parts come in turns, one router ahead of the other."""
    parts = list(parts_of(files("x", 3 * PART_BYTES), EPOCH))
    version, messages = parts[0].version, list(parts[:2])
    for ahead, behind in zip([*parts[2:], load(1, version=version)], parts, strict=False):
        messages += [ahead, behind]
    messages += [*parts[len(parts) - 2 :], load(2, version=version)]
    first, second = desk.take(*messages)
    assert (first.version, second.version) == (version, version)


def test_an_upload_that_was_refused_before_its_load_is_asked_for(desk):
    """Reading may be faster than the next message; and another router sends the same files."""
    desk.library.bad = {A.version}
    desk.take(*parts_of(A, EPOCH))
    for number in (1, 2):
        (answer,) = desk.take(load(number, version=A.version))
        assert answer.fault.code == "INVALID_ARGUMENT"
    desk.library.bad = set()
    assert desk.take(*parts_of(A, EPOCH), load(3, version=A.version))[0].version == A.version


def test_refused_uploads_are_remembered_up_to_a_number(desk):
    several = [files(f"{i}") for i in range(MAX_LOADING + 1)]
    desk.library.bad = {each.version for each in several}
    for each in several:
        desk.take(*parts_of(each, EPOCH))
    codes = [desk.take(load(version=each.version))[0].fault.code for each in several]
    assert codes == ["ADAPTER_MISSING", *["INVALID_ARGUMENT"] * MAX_LOADING]


def test_files_that_are_not_what_their_version_says_are_not_loaded(desk):
    parts = [replace(part, version=B.version) for part in parts_of(A, EPOCH)]
    (answer,) = desk.take(*parts, load(1, version=B.version))
    assert answer.fault.code == "ADAPTER_MISSING"
    broken = replace(parts[0], data=b"\xc1", count=1)
    assert desk.take(broken, load(2, version=B.version))[0].fault.code == "ADAPTER_MISSING"
    assert not desk.library.host


def test_uploads_that_never_end_are_bounded(desk):
    for i in range(MAX_UPLOADS + 3):
        desk.take(next(iter(parts_of(files(f"{i}", 2 * PART_BYTES), EPOCH))))
    assert len(desk.adapters._uploads) == MAX_UPLOADS


def test_loads_at_a_time_are_bounded(desk):
    desk.library.folders["/a"], desk.library.polls = A, 10**9
    answers = desk.take(*(load(i, "/a") for i in range(MAX_LOADING + 2)))
    assert [answer.fault.code for answer in answers] == ["OVERLOADED"] * 2


def test_the_latest_entry_counts_and_weights_that_no_id_stands_for_are_freed_in_time_if_not_used(desk):
    desk.library.host = {A.version: A, B.version: B}
    desk.library.used = {A.version}
    desk.take(named("x", A, 1.0))
    desk.take(named("x", B, 2.0))
    assert [(each.id, each.version) for each in desk.adapters.news(0).entries] == [("x", B.version)]
    desk.now += KEPT_SECONDS + 2
    desk.take()
    assert set(desk.library.host) == {A.version, B.version}
    desk.library.used, desk.now = set(), desk.now + 2
    desk.take()
    assert set(desk.library.host) == {B.version}
    desk.take(named("x", B, 3.0, removed=True))
    desk.now += KEPT_SECONDS - 2
    desk.take()
    assert set(desk.library.host) == {B.version}
    desk.now += 4
    desk.take()
    assert not desk.library.host
    assert desk.adapters.news(0).entries[0].removed


def test_weights_with_two_ids_stay_while_one_of_them_does(desk):
    desk.library.host = {A.version: A}
    desk.take(named("x", A), named("y", A))
    desk.take(named("x", A, 2.0, removed=True))
    assert set(desk.library.host) == {A.version}


def test_an_engine_without_adapters_says_so():
    (answer,) = Desk(None).take(load(3, "/a"))
    assert answer.fault.code == "INVALID_ARGUMENT"
    assert "serves none" in answer.fault.message


def test_messages_to_an_earlier_process_are_ignored(desk):
    desk.library.folders["/a"] = A
    assert desk.take(replace(load(1, "/a"), engine_epoch=EPOCH + 1)) == []
