"""A keeper on real sockets, asked by hand."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engine_worker.keeper import link as links
from engine_worker.keeper import messages, server, turns
from engine_worker.keeper.client import KeeperClient
from engine_worker.keeper.memory import StoredBlock
from engine_worker.keeper.messages import (
    Answer,
    Blocks,
    DropBlocks,
    Dropped,
    FindBlocks,
    FoundBlocks,
    Question,
    ReadBlocks,
    body_of,
    encode,
    form_of,
)
from engine_worker.pool_files.layout import Layout
from sluice.lanes import listener as listeners
from sluice.lanes.keys import PLAIN, ROLES, InsecureError, Keys, Security, generate
from tests.engine_worker.keeper.keepers import RunningKeeper, digests, stored
from tests.engine_worker.pool_files.files import LAYOUT, NUM_BLOCKS, content, digest, open_file, store
from tests.examples import examples

FORM = form_of(LAYOUT)
OTHER = form_of(LAYOUT._replace(name="other"))
SECONDS = 20.0


class Peer:
    """An engine's end of a connection."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def waits(self, seconds: float) -> bool:
        """Whether an answer arrives within this time."""
        return bool(self._socket.poll(int(seconds * 1000)))

    def receive(self) -> tuple[Answer, list[bytes]]:
        assert self._socket.poll(SECONDS * 1000)
        first, *data = self._socket.recv_multipart()
        return msgspec.msgpack.decode(body_of(first), type=Answer), data

    def ask(self, question: Question) -> tuple[Answer, list[bytes]]:
        self.send(encode(question))
        return self.receive()

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def peer(keeper: RunningKeeper) -> Iterator[Peer]:
    peer = Peer(keeper.address)
    yield peer
    peer.close()


def test_blocks_in_memory_are_found_and_read(keeper: RunningKeeper, peer: Peer, shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    for number in (1, 2, 4):
        store(file, number, number)
    assert peer.ask(FindBlocks(7, FORM, digests([1, 2, 3, 4]))) == (FoundBlocks(7, 2), [])
    assert peer.ask(FindBlocks(8, FORM, digests([3]))) == (FoundBlocks(8, 0), [])
    blocks = [stored(1), stored(2)]
    answer = Blocks(9, [block.total for block in blocks]), [bytes(block.data) for block in blocks]
    assert peer.ask(ReadBlocks(9, FORM, digests([1, 2, 3, 4]))) == answer
    assert peer.ask(ReadBlocks(10, FORM, [])) == (Blocks(10, []), [])
    assert keeper.keeper.read == {"memory": 2, "disk": 0}
    assert +keeper.keeper.answers == {"found": 1, "missing": 2, "read": 1}


def test_a_chain_may_be_partly_on_disk(keeper: RunningKeeper, peer: Peer, shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 2)
    assert keeper.disk is not None
    for number in (1, 3):
        keeper.disk.write(LAYOUT, digest(number), stored(number), 0)
    assert peer.ask(FindBlocks(1, FORM, digests([1, 2, 3, 4]))) == (FoundBlocks(1, 3), [])
    _, data = peer.ask(ReadBlocks(2, FORM, digests([1, 2, 3, 4])))
    assert data == [bytes(stored(number).data) for number in (1, 2, 3)]
    assert keeper.keeper.read == {"memory": 1, "disk": 2}


def test_another_layout_has_nothing(peer: Peer, shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    assert peer.ask(FindBlocks(1, OTHER, digests([1]))) == (FoundBlocks(1, 0), [])
    assert peer.ask(ReadBlocks(2, OTHER, digests([1]))) == (Blocks(2, []), [])


def test_few_layouts_are_kept_open(keeper: RunningKeeper, peer: Peer, shared_memory: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("engine_worker.keeper.memory.MAX_LAYOUTS", 2)
    for name in ("a", "b", "c", "a"):
        layout = LAYOUT._replace(name=name)
        _, file = open_file(shared_memory, "engine", layout=layout)
        store(file, 0, 1)
        assert peer.ask(FindBlocks(1, form_of(layout), digests([1]))) == (FoundBlocks(1, 1), [])
    for number in range(5):
        peer.ask(FindBlocks(1, form_of(LAYOUT._replace(name=str(number))), digests([1])))
    assert [layout.name for layout in keeper.keeper._memory._files] == ["c", "a"]


def test_files_that_begin_and_end_are_noticed(peer: Peer, shared_memory: Path) -> None:
    assert peer.ask(FindBlocks(1, FORM, digests([1])))[0] == FoundBlocks(1, 0)
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    assert peer.ask(FindBlocks(2, FORM, digests([1])))[0] == FoundBlocks(2, 1)
    Path(file.path).unlink()
    assert peer.ask(FindBlocks(3, FORM, digests([1])))[0] == FoundBlocks(3, 0)


def test_an_answer_is_bounded(peer: Peer, shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = open_file(shared_memory, "a")
    for number in range(NUM_BLOCKS):
        store(file, number, number)
    for size, count in ((3 * LAYOUT.block_bytes, 3), (3 * LAYOUT.block_bytes - 1, 2), (1, 1)):
        monkeypatch.setattr(messages, "ANSWER_BYTES", size)
        answer, data = peer.ask(ReadBlocks(1, FORM, digests(range(NUM_BLOCKS))))
        assert isinstance(answer, Blocks)
        assert len(answer.sums) == len(data) == count


def test_an_engine_that_does_not_read_its_answers_harms_nobody(
    keeper: RunningKeeper, peer: Peer, shared_memory: Path
) -> None:
    """Answers that it does not read are dropped."""
    layout = LAYOUT._replace(name="large", parts=(1 << 20,))
    _, file = open_file(shared_memory, "a", layout=layout)
    file.reserve(0)
    file.put(0, content(1))
    for number in range(60):
        peer.send(encode(ReadBlocks(number, form_of(layout), digests([1]))))
    other, end = Peer(keeper.address), time.monotonic() + SECONDS
    while keeper.keeper.answers["read"] < 60:
        assert other.ask(FindBlocks(1, form_of(layout), digests([1]))) == (FoundBlocks(1, 1), [])
        assert time.monotonic() < end
    other.close()
    # Questions are answered again once it has read what was kept for it.
    received = [peer.receive()[0].number]
    while peer.waits(0.5):
        received.append(peer.receive()[0].number)
    assert received == sorted(received)
    assert received[0] == 0
    assert peer.ask(DropBlocks(60)) == (Dropped(60, True), [])


def test_a_slow_disk_delays_only_those_who_ask_for_what_is_there(
    keeper: RunningKeeper, peer: Peer, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    assert keeper.disk is not None
    keeper.disk.write(LAYOUT, digest(2), stored(2), 0)
    awake, read = threading.Event(), keeper.disk.read

    def slow(layout: Layout, digest: bytes) -> StoredBlock | None:
        awake.wait(SECONDS)
        return read(layout, digest)

    monkeypatch.setattr(keeper.disk, "read", slow)
    other = Peer(keeper.address)
    for number in range(3):
        peer.send(encode(ReadBlocks(2 * number, FORM, digests([1, 2]))))
        peer.send(encode(ReadBlocks(2 * number + 1, FORM, digests([1]))))
    assert other.ask(ReadBlocks(9, FORM, digests([1]))) == (Blocks(9, [stored(1).total]), [bytes(stored(1).data)])
    assert not peer.waits(0.1)
    awake.set()
    # More than MAX_WAITING are not answered; the others are answered in order.
    answers = [peer.receive() for _ in range(turns.MAX_WAITING)]
    assert [(answer.number, len(data)) for answer, data in answers] == [(0, 2), (1, 1), (2, 2), (3, 1)]
    assert keeper.keeper.answers["busy"] == 2
    assert keeper.keeper.read == {"memory": 5, "disk": 2}
    other.close()


def test_a_disk_that_hangs_is_asked_by_few(
    keeper: RunningKeeper, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get what is in memory."""
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    assert keeper.disk is not None
    keeper.disk.write(LAYOUT, digest(2), stored(2), 0)
    awake = threading.Event()
    monkeypatch.setattr(keeper.disk, "read", lambda *_: awake.wait(SECONDS) and None)
    peers = [Peer(keeper.address) for _ in range(turns.MAX_IN_ALL)]
    for peer in peers:
        peer.send(encode(ReadBlocks(1, FORM, digests([1, 2]))))
    end = time.monotonic() + SECONDS
    while not keeper.keeper._turns.disk_is_full:
        assert time.monotonic() < end
        time.sleep(0.01)
    late = Peer(keeper.address)
    assert late.ask(ReadBlocks(2, FORM, digests([1, 2])))[0] == Blocks(2, [stored(1).total])
    assert late.ask(DropBlocks(3))[0] == Dropped(3, False)
    awake.set()
    for peer in (*peers, late):
        peer.close()


def test_a_drop_is_confirmed(keeper: RunningKeeper, peer: Peer) -> None:
    assert keeper.disk is not None
    keeper.disk.write(LAYOUT, digest(1), stored(1), 0)
    assert peer.ask(DropBlocks(5)) == (Dropped(5, True), [])
    assert peer.ask(FindBlocks(6, FORM, digests([1]))) == (FoundBlocks(6, 0), [])


def test_a_keeper_without_a_disk(shared_memory: Path) -> None:
    _, file = open_file(shared_memory, "a")
    store(file, 0, 1)
    with RunningKeeper(shared_memory) as keeper:
        peer = Peer(keeper.address)
        assert peer.ask(FindBlocks(1, FORM, digests([1, 2])))[0] == FoundBlocks(1, 1)
        assert peer.ask(ReadBlocks(2, FORM, digests([1, 2])))[0] == Blocks(2, [stored(1).total])
        assert peer.ask(DropBlocks(3))[0] == Dropped(3, True)
        peer.close()


def test_every_kind_of_answer_is_counted_from_the_start(keeper: RunningKeeper) -> None:
    """A scrape in another thread never sees a new key."""
    kinds = ("found", "missing", "read", "dropped", "not_dropped", "busy", "malformed")
    assert keeper.keeper.answers == dict.fromkeys(kinds, 0)


def test_a_disk_that_could_not_be_opened_has_not_dropped_its_blocks(shared_memory: Path) -> None:
    keeper = server.Keeper(f"ipc://{shared_memory}/keeper", PLAIN, shared_memory, None, disk_failed=True)
    peer = Peer(keeper.address)
    peer.send(encode(DropBlocks(1)))
    keeper.serve(SECONDS)
    assert peer.receive()[0] == Dropped(1, False)
    peer.close()
    keeper.close()


def test_malformed_questions_are_dropped_and_counted(keeper: RunningKeeper, peer: Peer) -> None:
    good = encode(DropBlocks(1))
    bad = [(b"",), (b"SK",), (good[:-1],), (good + b"x",), (good, good), (b"\x00" + good,), (encode(Dropped(1, True)),)]
    for frames in bad:
        peer.send(*frames)
    assert peer.ask(DropBlocks(2))[0] == Dropped(2, True)
    assert keeper.keeper.answers["malformed"] == len(bad)


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningKeeper, Peer]]:
    with RunningKeeper(tmp_path_factory.mktemp("idle")) as keeper:
        peer = Peer(keeper.address)
        yield keeper, peer
        peer.close()


HASHES = st.lists(st.binary(max_size=20), max_size=3)
FIELDS = st.tuples(
    st.text(max_size=5), st.integers(-1, 2000), st.lists(st.integers(-1, 1 << 31), max_size=4), st.booleans()
)
QUESTIONS = st.tuples(st.sampled_from(["FindBlocks", "ReadBlocks", "DropBlocks"]), st.integers(-1, 9), FIELDS, HASHES)


@given(st.binary(max_size=200) | QUESTIONS.map(msgspec.msgpack.encode), st.booleans())
@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_end_a_keeper(idle: tuple[RunningKeeper, Peer], body: bytes, prefixed: bool) -> None:
    _, peer = idle
    peer.send(encode(Dropped(0, True))[:4] + body if prefixed else body)
    peer.send(encode(DropBlocks(77)))
    while (answer := peer.receive()[0]) != Dropped(77, True):
        assert isinstance(answer, FoundBlocks | Blocks | Dropped)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(listeners, "KEYS_SECONDS", 0.02)
    for role in ROLES:
        generate(tmp_path / "keys", role)
    return tmp_path / "keys"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ANSWER_SECONDS", 0.3)


def with_keys(folder: Path, keys: Path) -> RunningKeeper:
    _, file = open_file(folder, "a")
    store(file, 0, 1)
    return RunningKeeper(folder, address="tcp://127.0.0.1:*", security=Security(Keys(keys, "engine", ("engine",))))


def found(keeper: RunningKeeper, keys: Keys) -> int:
    client = KeeperClient(Security(keys))
    try:
        return client.find(keeper.address, LAYOUT, digests([1, 2]))
    finally:
        client.close()


def test_engines_are_admitted_and_others_refused(
    shared_memory: Path, keys: Path, tmp_path: Path, impatient: None
) -> None:
    with with_keys(shared_memory, keys) as keeper:
        assert found(keeper, Keys(keys, "engine")) == 1
        assert not keeper.keeper.refused
        assert found(keeper, Keys(keys, "router")) == 0
        assert keeper.keeper.refused
        generate(tmp_path / "others", "engine")
        for role in ROLES[:1] + ROLES[2:]:
            generate(tmp_path / "others", role)
        assert found(keeper, Keys(tmp_path / "others", "engine")) == 0
        assert +keeper.keeper.answers == {"found": 1}


def test_an_engine_without_a_key_is_refused(shared_memory: Path, keys: Path, impatient: None) -> None:
    with with_keys(shared_memory, keys) as keeper:
        client = KeeperClient(Security(insecure=True))
        assert client.find(keeper.address, LAYOUT, digests([1])) == 0
        client.close()
        assert not keeper.keeper.answers.total()


def test_keys_may_be_replaced(shared_memory: Path, keys: Path) -> None:
    with with_keys(shared_memory, keys) as keeper:
        former = Keys(keys, "engine")
        own, public = former.own, former.public("engine")
        assert found(keeper, former) == 1
        generate(keys, "engine")
        end = time.monotonic() + SECONDS
        while keeper.keeper._listener._bound_with == own:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert Keys(keys, "engine").public("engine")[1:] == public
        assert found(keeper, Keys(keys, "engine")) == 1


def test_without_keys_only_this_machine_is_served(shared_memory: Path) -> None:
    with pytest.raises(InsecureError):
        RunningKeeper(shared_memory, address="tcp://127.0.0.1:*")
    with RunningKeeper(shared_memory, address="tcp://127.0.0.1:*", security=Security(insecure=True)) as keeper:
        peer = Peer(keeper.address)
        assert peer.ask(DropBlocks(1))[0] == Dropped(1, True)
        peer.close()


def test_connections_that_say_nothing_harm_nobody(shared_memory: Path, keys: Path) -> None:
    with with_keys(shared_memory, keys) as keeper:
        host, port = keeper.address.removeprefix("tcp://").split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(20)]
        assert found(keeper, Keys(keys, "engine")) == 1
        for connection in silent:
            connection.close()
