"""An engine that asks keepers, which answer rightly, wrongly, late or never."""

import threading
import time
from itertools import count, islice
from math import inf
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine_worker.keeper import client as clients
from engine_worker.keeper import link as links
from engine_worker.keeper import messages
from engine_worker.keeper.client import KeeperClient
from engine_worker.keeper.messages import Blocks, DropBlocks, Dropped, FindBlocks, FoundBlocks, Question
from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.pool_file import PoolFile
from sluice.lanes.keys import PLAIN
from tests.engine_worker.keeper.keepers import Frames, RunningKeeper, ScriptedKeeper, digests, frames, stored
from tests.engine_worker.pool_files.files import (
    LAYOUT,
    NUM_BLOCKS,
    digest,
    fill,
    holds,
    open_file,
    store,
)


class Reader:
    """An engine of another machine, which stores block `index` of an answer in its block `index`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        _, self.file = open_file(folder, "reader")

    def store(self, index: int, total: int, data: memoryview) -> bool:
        self.file.reserve(index)
        return self.file.write(index, data, total)

    def holds(self, *numbers: int) -> bool:
        return all(holds(self.file, index, number) for index, number in enumerate(numbers))


@pytest.fixture
def reader(shared_memory: Path) -> Reader:
    return Reader(shared_memory / "elsewhere")


@pytest.fixture
def owner(shared_memory: Path) -> PoolFile:
    _, file = open_file(shared_memory, "owner")
    for number in range(NUM_BLOCKS):
        store(file, number, number)
    return file


def answer(number: int, *contents: int) -> Frames:
    blocks = [stored(content) for content in contents]
    return frames(Blocks(number, [block.total for block in blocks]), [block.data for block in blocks])


def test_blocks_arrive_as_they_are(
    keeper: RunningKeeper, client: KeeperClient, owner: PoolFile, reader: Reader
) -> None:
    assert client.find(keeper.address, LAYOUT, digests([0, 1, 2, 99])) == 3
    assert client.read(keeper.address, LAYOUT, digests([5, 6, 7, 99, 8]), reader.store) == 3
    assert reader.holds(5, 6, 7)
    assert client.find(keeper.address, LAYOUT, []) == client.read(keeper.address, LAYOUT, [], reader.store) == 0
    assert not client.failed.total()


def test_many_blocks_arrive_in_several_answers(
    keeper: RunningKeeper, client: KeeperClient, owner: PoolFile, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "ANSWER_BYTES", 3 * LAYOUT.block_bytes)
    assert client.read(keeper.address, LAYOUT, digests(range(NUM_BLOCKS)), reader.store) == NUM_BLOCKS
    assert reader.holds(*range(NUM_BLOCKS))
    assert +keeper.keeper.answers == {"read": 6}
    owner.clear(7)
    assert client.read(keeper.address, LAYOUT, digests(range(NUM_BLOCKS)), reader.store) == 7
    # The question after the end was on its way already.
    assert client.find(keeper.address, LAYOUT, digests([0])) == 1


def test_the_next_question_is_sent_before_an_answer_is_stored(
    shared_memory: Path, client: KeeperClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "ANSWER_BYTES", LAYOUT.block_bytes)
    with ScriptedKeeper(shared_memory, lambda question: [answer(question.number, 1)]) as keeper:
        asked = []

        def accept(index: int, total: int, data: memoryview) -> bool:
            end = time.monotonic() + 10
            while len(keeper.questions) < min(index + 2, 4) and time.monotonic() < end:
                time.sleep(0.001)
            asked.append(len(keeper.questions))
            return True

        assert client.read(keeper.address, LAYOUT, digests([1] * 4), accept) == 4
        assert asked == [2, 3, 4, 4]


def test_a_store_that_refuses_a_block_ends_the_reading(
    keeper: RunningKeeper, client: KeeperClient, owner: PoolFile, reader: Reader
) -> None:
    def refuse_third(index: int, total: int, data: memoryview) -> bool:
        return index != 2 and reader.store(index, total, data)

    assert client.read(keeper.address, LAYOUT, digests(range(8)), refuse_third) == 2
    assert client.find(keeper.address, LAYOUT, digests([0])) == 1


def test_blocks_that_their_owner_overwrites_are_refused_or_right(
    keeper: RunningKeeper, client: KeeperClient, owner: PoolFile, reader: Reader
) -> None:
    stopped = threading.Event()

    def overwrite() -> None:
        for number in count(0):
            if stopped.is_set():
                return
            owner.clear(number % 3)
            store(owner, number % 3, number % 5)

    thread = threading.Thread(target=overwrite)
    thread.start()
    end, right = time.monotonic() + 20, 0
    while right < 20 and time.monotonic() < end:
        for number in range(5):
            if client.read(keeper.address, LAYOUT, digests([number]), reader.store):
                assert reader.holds(number)
                right += 1
    stopped.set()
    thread.join()
    assert right >= 20
    assert not client.failed.total()


def test_a_block_that_was_overwritten_without_notice_is_refused(
    keeper: RunningKeeper, client: KeeperClient, owner: PoolFile, reader: Reader
) -> None:
    fill(owner, 1, 2)
    assert client.read(keeper.address, LAYOUT, digests([0, 1, 2]), reader.store) == 1


def test_a_wrong_sum_is_refused(shared_memory: Path, client: KeeperClient, reader: Reader) -> None:
    wrong = frames(Blocks(0, [stored(1).total + 1]), [stored(1).data])
    with ScriptedKeeper(shared_memory, lambda question: [frames(Blocks(question.number, [1]), wrong[1:])]) as keeper:
        assert client.read(keeper.address, LAYOUT, digests([1]), reader.store) == 0


MALFORMED: dict[str, Any] = {
    "shorter": lambda number: frames(Blocks(number, [1]), [stored(1).data[:-1]]),
    "longer": lambda number: frames(Blocks(number, [1]), [bytes(stored(1).data) + b"x"]),
    "empty": lambda number: frames(Blocks(number, [1]), [b""]),
    "without the block": lambda number: frames(Blocks(number, [1])),
    "without the sum": lambda number: frames(Blocks(number, []), [stored(1).data]),
    "more than asked for": lambda number: answer(number, 1, 2, 3),
    "another answer": lambda number: frames(FoundBlocks(number, 1)),
    "no answer": lambda number: [b"hello"],
    "another version": lambda number: [b"SK\xff\xff" + frames(Blocks(number, []))[0][4:]],
    "cut off": lambda number: [frames(Blocks(number, []))[0][:-1]],
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_answers_are_misses(shared_memory: Path, client: KeeperClient, kind: str) -> None:
    with ScriptedKeeper(shared_memory, lambda question: [MALFORMED[kind](question.number)]) as keeper:
        assert client.read(keeper.address, LAYOUT, digests([1, 2]), never) == 0
        assert +client.failed == {"malformed": 1}
        # It is not asked again for a time.
        assert client.find(keeper.address, LAYOUT, digests([1])) == 0
        assert len(keeper.questions) == 1


def never(index: int, total: int, data: memoryview) -> bool:
    raise AssertionError("there is nothing to store")


def test_more_than_was_looked_for_is_malformed(shared_memory: Path, client: KeeperClient) -> None:
    with ScriptedKeeper(shared_memory, lambda question: [frames(FoundBlocks(question.number, 3))]) as keeper:
        assert client.find(keeper.address, LAYOUT, digests([1, 2])) == 0
        assert +client.failed == {"malformed": 1}


def test_a_late_answer_is_not_taken_for_the_present_one(shared_memory: Path, client: KeeperClient) -> None:
    def late(question: Question) -> list[Frames]:
        former = question.number - 1
        return [frames(FoundBlocks(former, 2)), answer(former, 7), frames(FoundBlocks(question.number, 1))]

    with ScriptedKeeper(shared_memory, late) as keeper:
        assert client.find(keeper.address, LAYOUT, digests([1, 2])) == 1
        assert not client.failed.total()


def test_a_silent_keeper_is_a_miss_after_two_seconds_and_then_at_once(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    client = KeeperClient(PLAIN, lambda: now)
    with ScriptedKeeper(shared_memory, lambda _: []) as keeper:
        began = time.monotonic()
        assert client.find(keeper.address, LAYOUT, digests([1])) == 0
        assert 1.9 < time.monotonic() - began < 5
        began = time.monotonic()
        for _ in range(100):
            assert client.find(keeper.address, LAYOUT, digests([1])) == 0
            assert client.read(keeper.address, LAYOUT, digests([1]), never) == 0
        assert time.monotonic() - began < 0.5
        assert +client.failed == {"timeout": 1}
        now = clients.PAUSE_SECONDS
        monkeypatch.setattr(links, "ANSWER_SECONDS", 0.1)
        assert client.find(keeper.address, LAYOUT, digests([1])) == 0
        assert +client.failed == {"timeout": 2}
    client.close()


def test_where_nobody_listens_nothing_is_found(client: KeeperClient, tmp_path: Path) -> None:
    began = time.monotonic()
    assert client.find(f"ipc://{tmp_path}/nobody", LAYOUT, digests([1])) == 0
    assert time.monotonic() - began < 5
    assert +client.failed == {"timeout": 1}


def test_a_keeper_that_ends_in_the_middle_leaves_what_was_stored(
    shared_memory: Path, client: KeeperClient, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "ANSWER_BYTES", LAYOUT.block_bytes)
    monkeypatch.setattr(links, "ANSWER_SECONDS", 0.3)
    numbers = iter([1, 2])

    def die(question: Question) -> list[Frames]:
        number = next(numbers, None)
        return [] if number is None else [answer(question.number, number)]

    with ScriptedKeeper(shared_memory, die) as keeper:
        began = time.monotonic()
        assert client.read(keeper.address, LAYOUT, digests(range(1, 9)), reader.store) == 2
        assert time.monotonic() - began < 5
        assert reader.holds(1, 2)
        assert +client.failed == {"timeout": 1}


def test_a_keeper_may_be_restarted(shared_memory: Path, owner: PoolFile, client: KeeperClient) -> None:
    for _ in range(2):
        with RunningKeeper(shared_memory) as keeper:
            assert client.find(keeper.address, LAYOUT, digests([1])) == 1


def test_blocks_on_disk_are_dropped(keeper: RunningKeeper, client: KeeperClient) -> None:
    assert keeper.disk is not None
    keeper.disk.write(LAYOUT, digest(99), stored(99), 0)
    assert client.find(keeper.address, LAYOUT, digests([99])) == 1
    assert client.drop(keeper.address)
    assert client.find(keeper.address, LAYOUT, digests([99])) == 0


def test_a_keeper_that_has_just_failed_is_still_asked_to_drop(shared_memory: Path, client: KeeperClient) -> None:
    def answers(question: Question) -> list[Frames]:
        return [frames(Dropped(question.number, True)) if isinstance(question, DropBlocks) else [b"hello"]]

    with ScriptedKeeper(shared_memory, answers) as keeper:
        assert client.find(keeper.address, LAYOUT, digests([1])) == 0
        assert client.drop(keeper.address)
        assert len(keeper.questions) == 2


def test_a_drop_that_the_keeper_could_not_do_is_not_confirmed(
    keeper: RunningKeeper, client: KeeperClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper.disk, "drop", lambda: False)
    assert not client.drop(keeper.address)
    assert +keeper.keeper.answers == {"not_dropped": 1}
    assert not client.failed.total()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyError])
def test_an_unexpected_exception_is_a_miss(
    keeper: RunningKeeper, client: KeeperClient, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error("unexpected")

    monkeypatch.setattr(links.Link, "find", fail)
    assert client.find(keeper.address, LAYOUT, digests([1])) == 0
    assert client.failed == {"timeout": 0, "malformed": 0, "unusable": 1}
    assert not client._links


def test_a_connection_that_cannot_be_made_leaves_no_socket(
    keeper: RunningKeeper, client: KeeperClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise closing the client would wait for it forever."""

    def fail(socket: "zmq.Socket[bytes]", *_: object) -> None:
        sockets.append(socket)
        raise RuntimeError

    sockets = list["zmq.Socket[bytes]"]()
    monkeypatch.setattr(links, "connect", fail)
    assert client.find(keeper.address, LAYOUT, digests([1])) == 0
    assert sockets[0].closed


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_is_awaited_after_the_end(shared_memory: Path, client: KeeperClient, stopped: bool) -> None:
    """What was stored before counts, and the keeper has not failed."""
    numbers = iter([1])

    def answer_once(question: Question) -> list[Frames]:
        return [answer(question.number, number) for number in islice(numbers, 1)]

    timer = threading.Timer(0.3, client.stop)
    with ScriptedKeeper(shared_memory, answer_once) as keeper:
        began = time.monotonic()
        if stopped:
            timer.start()
        end = inf if stopped else began + 0.3
        assert client.read(keeper.address, LAYOUT, digests([1] * 5000), lambda *_: True, end) == 1
        assert client.find(keeper.address, LAYOUT, digests([1]), end) == 0
        assert 0.2 < time.monotonic() - began < 1
    assert not client.failed.total()
    assert not client._links


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://127.0.0.1:1", "tcp://127.0.0.1:x", "hello", "ipc://"])
def test_addresses_that_cannot_be_used_are_misses(client: KeeperClient, address: str) -> None:
    assert client.find(address, LAYOUT, digests([1])) == 0
    assert not client.drop(address)
    assert +client.failed == {"unusable": 2}


def test_a_layout_whose_blocks_are_too_large_is_a_miss(keeper: RunningKeeper, client: KeeperClient) -> None:
    assert client.find(keeper.address, Layout("large", 16, (1 << 27,)), digests([1])) == 0
    assert +client.failed == {"unusable": 1}


def test_a_layout_with_too_many_tokens_is_a_miss_at_once(keeper: RunningKeeper, client: KeeperClient) -> None:
    assert client.find(keeper.address, LAYOUT._replace(tokens_per_block=1025), digests([1])) == 0
    assert +client.failed == {"unusable": 1}


def test_connections_and_failures_are_bounded(
    shared_memory: Path, client: KeeperClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "MAX_LINKS", 2)
    monkeypatch.setattr(clients, "MAX_PAUSED", 2)
    for number in range(3):
        folder = shared_memory / str(number)
        folder.mkdir(mode=0o700)
        with RunningKeeper(folder) as keeper:
            client.find(keeper.address, LAYOUT, digests([1]))
            client.find(f"bad{number}", LAYOUT, digests([1]))
    assert len(client._links) == len(client._paused) == 2


def test_a_long_list_is_found_in_part(shared_memory: Path, client: KeeperClient) -> None:
    def all_of(question: Question) -> list[Frames]:
        assert isinstance(question, FindBlocks)
        return [frames(FoundBlocks(question.number, len(question.hashes)))]

    with ScriptedKeeper(shared_memory, all_of) as keeper:
        assert client.find(keeper.address, LAYOUT, digests([1]) * (messages.MAX_FIND + 1)) == messages.MAX_FIND
        assert not client.failed.total()
