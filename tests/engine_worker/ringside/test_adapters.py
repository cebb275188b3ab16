import msgspec
import pytest
import structlog
from msgspec.structs import replace

from engine_worker.ringside.adapters import KEPT_SECONDS, MAX_LOADING, MAX_UPLOADS, Adapters
from sluice.wire.adapters import (
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
    """An engine's adapters, with the answers that they send."""

    def __init__(self, library: FakeLibrary | None) -> None:
        self.library = library
        self.sent: list[tuple[str, AdapterLoaded]] = []
        self.now = 1000.0
        self.adapters = Adapters(
            library, EPOCH, lambda *answer: self.sent.append(answer), structlog.get_logger(), lambda: self.now
        )

    def process(self, *messages) -> list[AdapterLoaded]:
        """Process messages; returns the answers."""
        for message in messages:
            # Encoded and decoded, as on a lane.
            self.adapters.on_message(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)))
        self.adapters.finish()
        answers, self.sent = [answer for _, answer in self.sent], []
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
    assert desk.process(load(5, "/a")) == []
    assert desk.adapters.pending
    assert desk.process() == [AdapterLoaded(EPOCH, 5, A.version, 8)]
    assert not desk.adapters.pending


def test_a_load_that_fails_is_answered_with_the_reason(desk):
    (answer,) = desk.process(load(5, "/nowhere"))
    assert (answer.version, answer.fault.code, answer.fault.message) == (
        "",
        "INVALID_ARGUMENT",
        "/nowhere is not a folder",
    )


@pytest.mark.parametrize("size", [1, PART_BYTES, 2 * PART_BYTES + 1])
def test_uploaded_parts_are_joined_checked_and_loaded(desk, size):
    uploaded = files("x", size)
    assert desk.process(*parts_of(uploaded, EPOCH), load(1, version=uploaded.version)) == [
        AdapterLoaded(EPOCH, 1, uploaded.version, 8)
    ]
    assert desk.library.host == {uploaded.version: uploaded}
    # Another load finds it in host memory.
    assert desk.process(load(2, version=uploaded.version)) == [AdapterLoaded(EPOCH, 2, uploaded.version, 8)]


def test_an_upload_with_a_missing_part_is_dropped_and_can_be_sent_again(desk):
    parts = list(parts_of(files("x", 3 * PART_BYTES), EPOCH))
    (answer,) = desk.process(parts[0], *parts[2:], load(1, version=parts[0].version))
    assert answer.fault.code == "ADAPTER_MISSING"
    assert not desk.library.host
    assert desk.process(*parts, load(2, version=parts[0].version))[0].version == parts[0].version


def test_two_routers_that_send_the_same_files_concurrently(desk):
    """The parts arrive alternately, one router ahead of the other."""
    parts = list(parts_of(files("x", 3 * PART_BYTES), EPOCH))
    version, messages = parts[0].version, list(parts[:2])
    for ahead, behind in zip([*parts[2:], load(1, version=version)], parts, strict=False):
        messages += [ahead, behind]
    messages += [*parts[len(parts) - 2 :], load(2, version=version)]
    first, second = desk.process(*messages)
    assert (first.version, second.version) == (version, version)


def test_an_upload_that_fails_before_its_load_message_arrives(desk):
    """Reading the files may be faster than the next message. Afterwards another router sends the same files."""
    desk.library.bad = {A.version}
    desk.process(*parts_of(A, EPOCH))
    for number in (1, 2):
        (answer,) = desk.process(load(number, version=A.version))
        assert answer.fault.code == "INVALID_ARGUMENT"
    desk.library.bad = set()
    assert desk.process(*parts_of(A, EPOCH), load(3, version=A.version))[0].version == A.version


def test_only_the_latest_failed_uploads_are_remembered(desk):
    uploads = [files(f"{i}") for i in range(MAX_LOADING + 1)]
    desk.library.bad = {upload.version for upload in uploads}
    for upload in uploads:
        desk.process(*parts_of(upload, EPOCH))
    codes = [desk.process(load(version=upload.version))[0].fault.code for upload in uploads]
    assert codes == ["ADAPTER_MISSING", *["INVALID_ARGUMENT"] * MAX_LOADING]


def test_files_that_do_not_match_their_version_are_not_loaded(desk):
    parts = [replace(part, version=B.version) for part in parts_of(A, EPOCH)]
    (answer,) = desk.process(*parts, load(1, version=B.version))
    assert answer.fault.code == "ADAPTER_MISSING"
    broken = replace(parts[0], data=b"\xc1", count=1)
    assert desk.process(broken, load(2, version=B.version))[0].fault.code == "ADAPTER_MISSING"
    assert not desk.library.host


def test_the_number_of_incomplete_uploads_is_limited(desk):
    for i in range(MAX_UPLOADS + 3):
        desk.process(next(iter(parts_of(files(f"{i}", 2 * PART_BYTES), EPOCH))))
    assert len(desk.adapters._uploads) == MAX_UPLOADS


def test_the_number_of_concurrent_loads_is_limited(desk):
    desk.library.folders["/a"], desk.library.polls = A, 10**9
    answers = desk.process(*(load(i, "/a") for i in range(MAX_LOADING + 2)))
    assert [answer.fault.code for answer in answers] == ["OVERLOADED"] * 2


def test_the_latest_entry_counts_and_unnamed_weights_are_freed_after_a_while_if_not_used(desk):
    desk.library.host = {A.version: A, B.version: B}
    desk.library.used = {A.version}
    desk.process(named("x", A, 1.0))
    desk.process(named("x", B, 2.0))
    assert [(entry.id, entry.version) for entry in desk.adapters.changes_since(0).entries] == [("x", B.version)]
    desk.now += KEPT_SECONDS + 2
    desk.process()
    assert set(desk.library.host) == {A.version, B.version}
    desk.library.used, desk.now = set(), desk.now + 2
    desk.process()
    assert set(desk.library.host) == {B.version}
    desk.process(named("x", B, 3.0, removed=True))
    desk.now += KEPT_SECONDS - 2
    desk.process()
    assert set(desk.library.host) == {B.version}
    desk.now += 4
    desk.process()
    assert not desk.library.host
    assert desk.adapters.changes_since(0).entries[0].removed


def test_weights_with_two_ids_are_kept_until_both_are_removed(desk):
    desk.library.host = {A.version: A}
    desk.process(named("x", A), named("y", A))
    desk.process(named("x", A, 2.0, removed=True))
    assert set(desk.library.host) == {A.version}


def test_an_engine_without_adapters_refuses_loads():
    (answer,) = Desk(None).process(load(3, "/a"))
    assert answer.fault.code == "INVALID_ARGUMENT"
    assert "serves no adapters" in answer.fault.message


def test_messages_to_an_earlier_process_are_ignored(desk):
    desk.library.folders["/a"] = A
    assert desk.process(replace(load(1, "/a"), engine_epoch=EPOCH + 1)) == []
