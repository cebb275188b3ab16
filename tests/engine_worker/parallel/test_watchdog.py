"""Who is lost, and who is only slow."""

import threading
import time

import pytest

from engine_worker.parallel.commands import Heartbeat, Shutdown, encode
from engine_worker.parallel.watchdog import Watchdog
from tests.fakes.command_sender import CommandSender
from tests.fakes.processes import wait_until

pytestmark = pytest.mark.slow

STEP_SECONDS = 0.5
COMMAND = encode(Shutdown())


@pytest.fixture
def sender():
    """Two others, which have loaded."""
    sender = CommandSender(3)
    sender.send(COMMAND)
    sender.through = {1: 1, 2: 1}
    return sender


@pytest.fixture
def lost():
    return []


@pytest.fixture
def since():
    """Since when a step has been waited for: the last of these."""
    return [None]


@pytest.fixture
def watch(sender, lost, since):
    watch = Watchdog(
        sender,
        3,
        lambda rank: {2: "was killed by SIGKILL"}.get(rank),
        lost.append,
        lambda: since[-1],
        load_seconds=3600.0,
        step_seconds=STEP_SECONDS,
    )
    yield watch
    watch.stop()


def keep_up(sender: CommandSender, ranks: list[int], seconds: float) -> None:
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
    assert sender.commands[1:] == [Heartbeat()]


def test_one_that_gets_on_slowly_is_not_lost(sender, watch, lost):
    for _ in range(50):
        sender.send(COMMAND)
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
    assert lost == ["rank 1 has made no progress for 0.5 s"]


@pytest.mark.parametrize(("rank", "why"), [(1, "rank 1 has disconnected"), (2, "rank 2 was killed by SIGKILL")])
def test_one_that_has_gone_is_lost_at_once(sender, watch, lost, rank, why):
    watch.start()
    sender.left.add(rank)
    assert wait_until(lambda: bool(lost))
    assert lost == [why]


def test_a_heartbeat_that_cannot_be_sent(sender, watch, lost):
    sender.broken = True
    watch.start()
    assert wait_until(lambda: bool(lost))
    assert lost == ["rank 2 has read nothing"]


def test_nobody_is_kept_waiting_for_a_heartbeat(sender, watch, lost):
    """While a command is being sent no heartbeat is needed."""
    sender.busy = True
    watch.start()
    time.sleep(1.4)
    assert sender.sent == 1
    assert not lost


def test_the_first_command_is_no_heartbeat(sender, watch):
    sender.commands.clear()
    watch.start()
    time.sleep(1.4)
    assert sender.sent == 0


def test_loading_may_take_longer(sender, watch, lost):
    """Whoever has taken long for it has as long for the next command as all others."""
    sender.through = {1: 0, 2: 1}
    watch.start()
    keep_up(sender, [2], 1.0)
    assert not lost
    sender.through[1] = 1
    keep_up(sender, [2], 0.3)
    assert not lost
    keep_up(sender, [2], 2.0)
    assert lost == ["rank 1 has made no progress for 0.5 s"]


def test_a_step_that_does_not_come_back(sender, watch, lost, since):
    """As where the device hangs: all ranks are through with it, for they have queued it."""
    sender.keeps_up = True
    since.append(time.monotonic())
    watch.start()
    assert wait_until(lambda: bool(lost))
    assert lost == ["a step has not come back from the device for 0.5 s"]


def test_steps_that_come_back_one_after_the_other(sender, watch, lost, since):
    sender.keeps_up = True
    watch.start()
    for i in range(12):
        since.append(float(i))
        time.sleep(0.1)
    since.append(None)
    time.sleep(1.0)
    assert not lost


def test_after_its_end_nobody_is_lost(sender, watch, lost):
    watch.start()
    watch.stop()
    sender.left.add(1)
    time.sleep(0.3)
    assert not lost
