"""Requests whose blocks an engine of another machine has computed: keepers have them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_worker.keeper.client import KeeperClient
from engine_worker.keeper.kept_blocks import KeptBlocks
from engine_worker.keeper.server import Keeper
from engine_worker.kvcache import keepers as searches
from engine_worker.kvcache.copies import KEEPER
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.pool_file import PoolFile
from sluice.lanes.keys import PLAIN
from sluice.wire.errors import FinishReason
from tests.fakes.engine import EngineBench

SIZE = 4
"""Tokens per block."""
PROMPT = [1 + number % 50 for number in range(300)]
ALL = 75
"""Blocks of the prompt and the tokens that `first` computes after it."""


class Machine:
    """Engines that share a folder, and their keeper."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.keeper = Keeper(f"ipc://{folder}/keeper", PLAIN, folder, None)
        self._engines: list[EngineBench] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def address(self) -> str:
        return self.keeper.address

    def engine(self, name: str, *, own: str = "", **options) -> EngineBench:
        bench = EngineBench(
            num_blocks=options.pop("num_blocks", 256),
            tokens_per_block=SIZE,
            folder=PoolFolder(self.folder, name, pytest.fail),
            keepers=lambda file: KeptBlocks(KeeperClient(PLAIN), own, file),
            **options,
        )
        self._engines.append(bench)
        return bench

    def close(self) -> None:
        for bench in self._engines:
            bench.cache.fetches.close()
        self._stopped.set()
        self._thread.join()
        self.keeper.close()

    def _serve(self) -> None:
        while not self._stopped.is_set():
            self.keeper.serve(0.01)


@pytest.fixture
def machines(shared_memory: Path) -> Iterator[list[Machine]]:
    two = [Machine(shared_memory / name) for name in ("a", "b")]
    yield two
    for machine in two:
        machine.close()


@pytest.fixture
def there(machines: list[Machine]) -> Machine:
    """A machine whose engine has computed the first tokens after PROMPT."""
    first = machines[0].engine("a")
    first.submit(PROMPT, max_tokens=4)
    first.run()
    return machines[0]


@pytest.fixture
def here(machines: list[Machine]) -> EngineBench:
    """An engine of another machine."""
    return machines[1].engine("b")


def test_blocks_of_another_machine_are_copied(there: Machine, here: EngineBench) -> None:
    request = here.submit(PROMPT, max_tokens=4, kv_keepers=(there.address,))
    here.run()
    assert here.output(request) == here.expected(request)
    assert here.cache.fetches.sources == {"machine": 0, "keeper": ALL - 1}
    # The last block of the prompt, since its last token is always computed.
    assert here.runner.computed == SIZE + 3
    assert there.keeper.answers["found"] == 1


def test_a_copied_block_is_found_like_a_computed_one(there: Machine, here: EngineBench) -> None:
    for seed in range(2):
        here.submit(PROMPT, max_tokens=1, seed=seed, kv_keepers=(there.address,))
        here.run()
    assert there.keeper.answers["found"] == 1
    assert here.runner.computed == 2 * SIZE


def test_every_sequence_finds_its_own_tokens(machines: list[Machine]) -> None:
    first = machines[0].engine("a")
    before = first.submit(PROMPT, max_tokens=40, n=2)
    first.run()
    tokens = {index: first.output(before, index)[:36] for index in range(2)}
    second = machines[1].engine("b")
    # Short tails are worth a question here.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searches, "MIN_SOUGHT_TOKENS", 8)
        after = second.submit(
            PROMPT, max_tokens=40, n=2, attempt=1, request=before, resume=tokens, kv_keepers=(machines[0].address,)
        )
        second.run()
    for index in range(2):
        assert second.output(after, index, 1) == first.output(before, index)
    assert second.runner.computed <= 2 * (SIZE + 4)


def test_a_keeper_that_does_not_answer_is_a_miss(here: EngineBench, tmp_path: Path) -> None:
    request = here.submit(PROMPT, max_tokens=4, kv_keepers=(f"ipc://{tmp_path}/none",))
    here.run()
    assert here.output(request) == here.expected(request)
    assert here.cache.fetches.fetched == 0
    assert here.cache.fetches.keeper_failures["timeout"] == 1


def test_the_second_keeper_is_asked_too(there: Machine, here: EngineBench, tmp_path: Path) -> None:
    here.submit(PROMPT, max_tokens=4, kv_keepers=(f"ipc://{tmp_path}/none", there.address))
    here.run()
    assert here.cache.fetches.fetched == ALL - 1


def test_the_keeper_of_this_machine_is_asked_without_being_named(machines: list[Machine], there: Machine) -> None:
    """It may have a disk. Here it has the files of another folder."""
    second = machines[1].engine("b", own=there.address)
    second.submit(PROMPT, max_tokens=1)
    second.run()
    assert second.cache.fetches.sources[KEEPER] == ALL - 1


def test_no_keeper_is_asked_for_few_tokens(there: Machine, here: EngineBench) -> None:
    here.submit(PROMPT[:200], max_tokens=1, kv_keepers=(there.address,))
    here.run()
    assert not there.keeper.answers.total()


def test_copies_take_half_of_the_memory(machines: list[Machine], there: Machine) -> None:
    second = machines[1].engine("b", num_blocks=100)
    request = second.submit(PROMPT, max_tokens=1, kv_keepers=(there.address,))
    second.run()
    assert second.output(request) == second.expected(request)
    assert second.cache.fetches.fetched == 50
    assert second.cache.fetches.refused["memory"] == ALL - 1 - 50


class Silent:
    """Keepers that answer once the test lets them."""

    def __init__(self, file: PoolFile) -> None:
        self.own = "silent"
        self.answering = threading.Event()
        self.asked = self.dropped = 0
        self.failures: dict[str, int] = {}
        self.drops = True
        """Whether it confirms that its blocks were dropped."""

    def find(self, address: str, digests: list[bytes], end: float) -> int:
        self.asked += 1
        assert self.answering.wait(60)
        return len(digests)

    def read(self, address: str, digests: list[bytes], blocks: list[int], end: float) -> list[int]:
        pytest.fail("nothing is to be copied")

    def drop(self) -> bool:
        self.dropped += 1
        return self.drops

    def stop(self) -> None:
        self.answering.set()

    def close(self) -> None: ...


@pytest.fixture
def asking(shared_memory: Path) -> tuple[EngineBench, Silent]:
    """An engine whose keeper lets it wait, and this keeper."""
    made = list[Silent]()

    def make(file: PoolFile) -> Silent:
        made.append(Silent(file))
        return made[-1]

    folder = PoolFolder(shared_memory, "a", pytest.fail)
    return EngineBench(num_blocks=256, tokens_per_block=SIZE, folder=folder, keepers=make), made[0]


def test_other_requests_run_while_a_keeper_is_asked(asking: tuple[EngineBench, Silent]) -> None:
    bench, keeper = asking
    waiting, other = bench.submit(PROMPT, max_tokens=1), bench.submit([7, 8, 9], max_tokens=2)
    for _ in range(5):
        bench.step()
    assert bench.output(other) == bench.expected(other)
    assert (waiting, 0, 0) not in bench.receiver.streams
    bench.cancel(waiting)
    bench.step()
    keeper.answering.set()
    while bench.cache.fetches:
        bench.step()
    assert bench.ended(waiting) is FinishReason.ABORTED


def test_a_flush_drops_what_is_found_before_it(asking: tuple[EngineBench, Silent]) -> None:
    bench, keeper = asking
    request = bench.submit(PROMPT, max_tokens=1)
    bench.step()
    bench.cache.flush()
    keeper.answering.set()
    bench.run()
    bench.cache.fetches.close()
    assert bench.output(request) == bench.expected(request)
    assert keeper.dropped == 1


def test_running_sequences_need_not_wait_for_a_keeper(asking: tuple[EngineBench, Silent]) -> None:
    """A search holds no blocks: where memory is short, sequences are preempted as ever."""
    bench, keeper = asking
    # Together they need more than the pool has.
    running = [bench.submit([number], max_tokens=600, seed=number) for number in (1, 2)]
    bench.step()
    bench.submit(PROMPT, max_tokens=1)
    for _ in range(700):
        bench.step()
    assert bench.ended(running[0]) is FinishReason.LENGTH
    keeper.answering.set()
    bench.submit([3], max_tokens=1)
    bench.cancel(3)
    bench.run()


def test_a_keeper_that_may_have_old_blocks_is_not_asked(asking: tuple[EngineBench, Silent]) -> None:
    bench, keeper = asking
    keeper.drops = False
    keeper.answering.set()
    bench.cache.flush()
    bench.submit(PROMPT, max_tokens=1)
    bench.run()
    assert (keeper.asked, keeper.dropped) == (0, 2)


def test_the_end_of_an_engine_does_not_wait_for_a_keeper(asking: tuple[EngineBench, Silent]) -> None:
    bench, keeper = asking
    for number in range(3):
        bench.submit([number, *PROMPT], max_tokens=1)
    bench.step()
    bench.cache.fetches.close()
    assert keeper.asked <= 1


def test_without_memory_for_the_blocks_before_them_none_are_looked_for(there: Machine, machines: list[Machine]) -> None:
    beside = there.engine("c", num_blocks=180)
    # The file of the machine has 75 blocks. Half of the memory would do for 90, of which a running sequence takes most.
    beside.submit([7] * 400, max_tokens=1)
    beside.step()
    request = beside.submit([*PROMPT, *PROMPT[::-1]], max_tokens=1, kv_keepers=(machines[1].address,))
    beside.run()
    assert beside.output(request) == beside.expected(request)
    assert not machines[1].keeper.answers["missing"]


def test_nothing_is_copied_that_is_computed_in_less_time(there: Machine, machines: list[Machine]) -> None:
    second = machines[1].engine("b")
    second.submit(PROMPT, max_tokens=1, kv_keepers=(there.address,))
    second.run()
    second.engine.stats.context_rate = 1e12
    second.submit(PROMPT[::-1], max_tokens=1, kv_keepers=(there.address,))
    second.run()
    assert there.keeper.answers["missing"] == 0
    assert second.cache.fetches.refused["slow"] == ALL - 1
