"""Copies of full blocks in a side stream."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine_worker.attention import cache as caches
from engine_worker.attention.cache import KVCache, host_layout
from engine_worker.attention.saver import BlockSaver, Inline, SideStream, _runs, side_stream
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Move, MoveKind

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 6, 4, 2, 8
CPU = torch.device("cpu")


class Device:
    """A device with two streams that computes only when it has to, and as late as it may."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._queues: dict[str, list[tuple[Callable[[], None], list[Event]]]] = {"main": [], "side": []}
        self._waits: dict[str, list[Event]] = {"main": [], "side": []}

    def add(self, stream: str, name: str, work: Callable[[], None] = lambda: None) -> "Event":
        event = Event(self, stream)

        def run() -> None:
            work()
            self.log.append(name)
            event.over = True

        waits, self._waits[stream] = self._waits[stream], []
        self._queues[stream].append((run, waits))
        event.number = len(self._queues[stream])
        self._latest = event
        return event

    def wait_event(self, stream: str, event: "Event") -> None:
        self._waits[stream].append(event)

    def run_until(self, event: "Event") -> None:
        queue = self._queues[event.stream]
        while not event.over:
            work, waits = queue.pop(0)
            for other in waits:
                self.run_until(other)
            work()


class Event:
    """The end of a piece of work."""

    def __init__(self, device: Device, stream: str) -> None:
        self._device = device
        self.stream = stream
        self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self._device.run_until(self)

    def hold_back(self) -> None:
        self._device.wait_event("main", self)


class Side(SideStream):
    def __init__(self, device: Device) -> None:
        self._device = device

    def queue(self, work: Callable[[], None]) -> Event:
        self._device.wait_event("side", self._device.add("main", "event"))
        return self._device.add("side", "copies", work)


def blocks_of(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks as in a KVCache, with a spare slot after those of each layer; and host blocks."""
    slots = torch.arange(2 * LAYERS * (BLOCKS * TOKENS + 1) * HEADS * DIM).to(dtype)
    slots = slots.view(2, LAYERS, BLOCKS * TOKENS + 1, HEADS, DIM)
    return slots[:, :, :-1].unflatten(2, (BLOCKS, TOKENS)), torch.zeros(
        BLOCKS, 2, LAYERS, TOKENS, HEADS, DIM, dtype=dtype
    )


@pytest.mark.parametrize("staged", [1, 2, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_copied_with_their_sums(dtype: torch.dtype, staged: int):
    blocks, host = blocks_of(dtype)
    sums: dict[int, int] = {}
    saver = BlockSaver(blocks, host, Inline(), sums.__setitem__, staged * host[0].nbytes)
    pairs = [(4, 1), (0, 5), (3, 2), (5, 0)]
    saver.save(pairs).land()
    for source, target in pairs:
        assert host[target].equal(blocks[:, :, source])
        words = host[target].contiguous().view(torch.uint8).numpy().view("<u8")
        assert sums[target] == int(words.sum())
    assert not host[3:5].any()


def test_blocks_whose_slots_are_no_words_have_no_sums():
    blocks, host = blocks_of(torch.bfloat16)
    sums: dict[int, int] = {}
    saver = BlockSaver(blocks[..., :1, :3], host[..., :1, :3].contiguous(), Inline(), sums.__setitem__)
    # Slots of 6 bytes. Their memory must not be changed as words of 8.
    assert saver.save([(1, 1)]) is not None
    assert sums == {}


def test_copies_begin_after_what_was_queued_and_land_before_their_sums():
    device = Device()
    blocks, host = blocks_of()
    sums: dict[int, int] = {}
    saver = BlockSaver(blocks, host, Side(device), sums.__setitem__)
    device.add("main", "write", lambda: blocks[:, :, 2].fill_(7))
    saved = saver.save([(2, 0)])
    assert device.log == []
    saved.land()
    assert device.log == ["write", "event", "copies"]
    assert host[0].eq(7).all()
    assert sums.keys() == {0}


def test_the_step_computes_while_copies_are_made():
    device = Device()
    saver = BlockSaver(*blocks_of(), Side(device), lambda block, total: None)
    saver.join()
    saver.save([(2, 0)])
    device.add("main", "model").wait()
    assert device.log == ["event", "model"]


def test_the_next_step_waits_for_copies_under_way():
    device = Device()
    blocks, host = blocks_of()
    before = blocks[:, :, 2].clone()
    saver = BlockSaver(blocks, host, Side(device), lambda block, total: None)
    saver.save([(2, 0)])
    saver.join()
    device.add("main", "overwrite", lambda: blocks[:, :, 2].fill_(0)).wait()
    assert device.log == ["event", "copies", "overwrite"]
    assert host[0].equal(before)


def test_nothing_waits_for_copies_that_have_been_made():
    device = Device()
    saver = BlockSaver(*blocks_of(), Side(device), lambda block, total: None)
    saver.save([(2, 0)]).land()
    saver.join()
    assert device._waits["main"] == []


class Opened:
    def __init__(self, folder: Path) -> None:
        view = PoolFolder(folder, "a", print)
        file = view.open(host_layout(LAYERS, TOKENS, HEADS, DIM, torch.float32), "", lambda: BLOCKS)
        assert file is not None
        self.file: PoolFile = file
        self.cache = KVCache(LAYERS, BLOCKS, TOKENS, HEADS, DIM, torch.float32, CPU, BLOCKS, file)


@pytest.fixture
def opened(shared_memory: Path) -> Opened:
    return Opened(shared_memory)


def test_the_host_pool_of_a_cache_is_in_the_file(opened: Opened):
    for index, layer in enumerate(opened.cache.layers):
        layer.keys[3], layer.values[3] = index + 1, -index - 1
    opened.cache.move([Move(MoveKind.SAVE, 3, 1), Move(MoveKind.COPY, 0, 2)])
    saved = opened.cache.take_saved()
    assert opened.cache.take_saved() is None
    saved.land()
    assert opened.file.take_sum(1) == opened.file.sum(1) != 0
    opened.cache.move([Move(MoveKind.ONLOAD, 1, 5)])
    assert opened.cache.take_saved() is None
    for index, layer in enumerate(opened.cache.layers):
        assert layer.keys[5].eq(index + 1).all()
        assert layer.values[5].eq(-index - 1).all()
    part = opened.file.parts[0][1].view("f4").reshape(2, LAYERS, -1)
    assert [row[0] for row in part[0]] == [1, 2, 3]


def test_other_moves_of_a_step_come_before_its_copies(opened: Opened):
    """The host block is loaded before it receives other content."""
    opened.cache.layers[0].keys[0] = 1
    opened.cache.layers[0].keys[1] = 2
    opened.cache.move([Move(MoveKind.OFFLOAD, 0, 4)])
    opened.cache.move([Move(MoveKind.SAVE, 1, 4), Move(MoveKind.ONLOAD, 4, 5)])
    assert opened.cache.layers[0].keys[5].eq(1).all()
    opened.cache.move([Move(MoveKind.ONLOAD, 4, 5)])
    assert opened.cache.layers[0].keys[5].eq(2).all()


def test_the_moves_of_the_next_step_wait_for_the_copies(shared_memory: Path, monkeypatch):
    device = Device()
    monkeypatch.setattr(caches, "side_stream", lambda _: Side(device))
    cache = Opened(shared_memory).cache
    cache.move([Move(MoveKind.SAVE, 3, 1)])
    cache.move([])
    device.add("main", "overwrite").wait()
    assert device.log == ["event", "copies", "overwrite"]


def test_a_cache_without_a_file_saves_nothing():
    """Such as that of a draft model."""
    cache = KVCache(LAYERS, BLOCKS, TOKENS, HEADS, DIM, torch.float32, CPU, BLOCKS)
    cache.move([Move(MoveKind.SAVE, 0, 1)])
    assert cache.take_saved() is None


def test_all_blocks_are_reserved_before_their_memory_is_pinned(shared_memory: Path, monkeypatch):
    log: list[str] = []
    reserve = PoolFile.reserve_all

    def reserve_all(file: PoolFile) -> None:
        reserve(file)
        assert file._reserved == BLOCKS
        log.append("reserved")

    def pin(cache: KVCache, blocks: torch.Tensor, device: torch.device) -> torch.Tensor:
        log.append("pinned")
        return blocks

    monkeypatch.setattr(PoolFile, "reserve_all", reserve_all)
    monkeypatch.setattr(KVCache, "_pinned", pin)
    Opened(shared_memory)
    assert log == ["reserved", "pinned"]


def test_memory_of_an_adopted_file_needs_no_room(opened: Opened, shared_memory: Path, monkeypatch):
    def refuse(file: PoolFile, size: int) -> None:
        raise OSError("full")

    opened.file.close()
    monkeypatch.setattr(PoolFile, "_check_room", refuse)
    again = Opened(shared_memory).file
    assert again.path == opened.file.path
    assert again._shared == BLOCKS


def test_adopting_does_not_touch_pinned_memory(opened: Opened, shared_memory: Path):
    """Pages that were released would be others when they are used again, and the device would write to the old ones."""
    opened.file.close()
    file = Opened(shared_memory).file
    file.parts[0][:] = 7
    list(file.adopted())
    assert (file.parts[0] == 7).all()


def test_neighbours_on_the_host_are_copied_together():
    saver = BlockSaver(*blocks_of(), Inline(), lambda block, total: None)
    assert saver.save([(0, 4), (1, 1), (2, 5), (3, 0)])._targets == [0, 1, 4, 5]
    assert list(_runs([0, 1, 4, 5, 9])) == [(0, range(2)), (2, range(4, 6)), (4, range(9, 10))]


class FakeStream:
    """Records what was queued on it."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def wait_stream(self, other: "FakeStream") -> None:
        self._log.append(f"{self._name} waits for {other._name}")

    def wait_event(self, event: "FakeEvent") -> None:
        self._log.append(f"{self._name} waits for the event of {event.stream._name}")


class FakeEvent:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.stream._log.append(f"the host waits for {self.stream._name}")


def test_work_in_the_side_stream_of_cuda(monkeypatch):
    log: list[str] = []
    main, side = FakeStream("main", log), FakeStream("side", log)
    current = [main]

    @contextmanager
    def within(stream: FakeStream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", within)
    queued = side_stream(torch.device("cuda", 0)).queue(lambda: log.append(f"work in {current[-1]._name}"))
    assert not queued.done()
    queued.hold_back()
    queued.wait()
    assert log == [
        "side waits for main",
        "work in side",
        "main waits for the event of side",
        "the host waits for side",
    ]


def test_pinned_memory_is_released_with_the_cache(monkeypatch):
    calls: list[tuple[str, int]] = []

    class Cudart:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            calls.append(("pinned", address))
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            calls.append(("released", address))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    cache = KVCache(LAYERS, BLOCKS, TOKENS, HEADS, DIM, torch.float32, CPU, BLOCKS)
    cache._pinned(cache._host_blocks, FakeStream.device)
    address = cache._host_blocks.data_ptr()
    assert calls == [("pinned", address)]
    del cache
    assert calls == [("pinned", address), ("released", address)]
