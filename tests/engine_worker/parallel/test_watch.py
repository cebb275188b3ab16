"""Who is lost, and who is only slow."""

import threading
import time

import pytest

from engine_worker.parallel.channel import ChannelError
from engine_worker.parallel.watch import Watch
from tests.fakes.processes import wait_until


class Told:
    """A sender whose ranks do as the test says."""

    def __init__(self) -> None:
        self.sent = 0
        self.through = {1: 0, 2: 0}
        self.left: set[int] = set()
        self.busy = False
        self.broken = False

    def send(self, parts) -> None:
        if self.broken:
            raise ChannelError("rank 2 has read nothing")
        self.sent += 1

    def idle(self) -> bool:
        return not self.busy

    def done(self, rank: int) -> int:
        return self.through[rank]

    def gone(self, rank: int) -> bool:
        return rank in self.left


@pytest.fixture
def sender():
    return Told()


@pytest.fixture
def lost():
    return []


@pytest.fixture
def watch(sender, lost):
    watch = Watch(sender, 3, lambda rank: {2: "was killed by SIGKILL"}.get(rank), lost.append, seconds=0.5)
    yield watch
    watch.stop()


def keep_up(sender: Told, ranks: list[int], seconds: float) -> None:
    """These ranks are through with whatever comes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for rank in ranks:
            sender.through[rank] = sender.sent
        time.sleep(0.01)


def test_one_that_has_nothing_to_do_is_not_lost(sender, watch, lost):
    watch.start()
    keep_up(sender, [1, 2], 1.5)
    assert not lost
    assert sender.sent >= 1


def test_one_that_gets_on_slowly_is_not_lost(sender, watch, lost):
    sender.sent = 50
    watch.start()
    for _ in range(10):
        time.sleep(0.1)
        sender.through = {1: sender.through[1] + 1, 2: sender.sent}
    assert not lost


def test_one_that_does_not_get_on_is_lost(sender, watch, lost):
    watch.start()
    helper = threading.Thread(target=keep_up, args=(sender, [2], 2.0))
    helper.start()
    assert wait_until(lambda: bool(lost))
    helper.join()
    assert lost == ["rank 1 has not got on for 0.5 s"]


@pytest.mark.parametrize(("rank", "why"), [(1, "rank 1 has gone"), (2, "rank 2 was killed by SIGKILL")])
def test_one_that_has_gone_is_lost_at_once(sender, watch, lost, rank, why):
    watch.start()
    sender.left.add(rank)
    assert wait_until(lambda: bool(lost))
    assert lost == [why]


def test_a_beat_that_cannot_be_sent(sender, watch, lost):
    sender.broken = True
    watch.start()
    assert wait_until(lambda: bool(lost))
    assert lost == ["rank 2 has read nothing"]


def test_nobody_is_kept_waiting_for_a_beat(sender, watch, lost):
    """While a command is being sent no beat is needed."""
    sender.busy = True
    watch.start()
    time.sleep(1.4)
    assert sender.sent == 0
    assert not lost


def test_the_limit_may_change(sender, watch, lost):
    watch.limit = 3600.0
    sender.sent = 1
    watch.start()
    time.sleep(1.0)
    assert not lost
    watch.limit = 0.2
    assert wait_until(lambda: bool(lost))


def test_after_its_end_nobody_is_lost(sender, watch, lost):
    watch.start()
    watch.stop()
    sender.left.add(1)
    time.sleep(0.3)
    assert not lost
