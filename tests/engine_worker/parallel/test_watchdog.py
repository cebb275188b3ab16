"""Which ranks count as lost, and which are only slow."""

from collections.abc import Callable

import pytest

from engine_worker.parallel.commands import Heartbeat, Shutdown, encode
from engine_worker.parallel.watchdog import Watchdog
from tests.fakes.command_sender import CommandSender
from tests.fakes.processes import wait_until

STEP_SECONDS = 0.5
TICK = 0.1
COMMAND = encode(Shutdown())


@pytest.fixture
def sender():
    """A sender to two ranks that have loaded."""
    sender = CommandSender(3)
    sender.send(COMMAND)
    sender.through = {1: 1, 2: 1}
    return sender


@pytest.fixture
def lost():
    return []


@pytest.fixture
def waiting_since():
    """Start of the wait in progress: the last element."""
    return [None]


@pytest.fixture
def has_loaded():
    """Whether rank 0 knows that all ranks have loaded: the last element."""
    return [False]


@pytest.fixture
def watch(sender, lost, has_loaded, waiting_since):
    """A watchdog that is not started: most tests call `tick`, so that they do not depend on the speed of a thread."""
    watch = Watchdog(
        sender,
        3,
        lambda rank: {2: "was killed by SIGKILL"}.get(rank),
        lost.append,
        lambda: has_loaded[-1],
        lambda: waiting_since[-1],
        load_seconds=3600.0,
        step_seconds=STEP_SECONDS,
    )
    yield watch
    watch.stop()


def tick_for(watch: Watchdog, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> str | None:
    """Tick for `seconds`, or until the group is lost, and return why. `meanwhile` is called before each tick."""
    for _ in range(round(seconds / TICK)):
        meanwhile()
        if reason := watch.tick(TICK):
            return reason
    return None


def keeping_up(sender: CommandSender, *ranks: int) -> Callable[[], None]:
    """A function by which these ranks complete all commands so far."""

    def keep_up() -> None:
        sender.through |= dict.fromkeys(ranks, sender.sent)

    return keep_up


def test_an_idle_rank_is_not_lost(sender, watch):
    assert tick_for(watch, 1.5, keeping_up(sender, 1, 2)) is None
    assert sender.commands[1:] == [Heartbeat()]


def test_a_slow_rank_is_not_lost(sender, watch):
    for _ in range(50):
        sender.send(COMMAND)

    def make_progress() -> None:
        sender.through = {1: sender.through[1] + 1, 2: sender.sent}

    for _ in range(10):
        make_progress()
        assert tick_for(watch, 0.4) is None


def test_a_rank_without_progress_is_lost(sender, watch):
    assert tick_for(watch, 2.0, keeping_up(sender, 2)) == "rank 1 has made no progress for 0.5 s"


@pytest.mark.parametrize(("rank", "why"), [(1, "rank 1 has disconnected"), (2, "rank 2 was killed by SIGKILL")])
def test_a_disconnected_rank_is_lost_immediately(sender, watch, lost, rank, why):
    """In the watchdog's thread."""
    watch.start()
    sender.disconnected_ranks.add(rank)
    assert wait_until(lambda: bool(lost))
    assert lost == [why]


def test_a_heartbeat_that_cannot_be_sent(sender, watch):
    sender.broken = True
    assert tick_for(watch, 2.0) == "rank 2 has read nothing"


def test_no_heartbeat_while_a_command_is_sent(sender, watch):
    """While a command is being sent, no heartbeat is needed."""
    sender.busy = True
    assert tick_for(watch, 1.5) is None
    assert sender.sent == 1


def test_the_first_command_is_not_a_heartbeat(sender, watch):
    sender.commands.clear()
    tick_for(watch, 1.5)
    assert sender.sent == 0


def test_loading_may_take_longer(sender, watch):
    """After that, the usual time limit applies, however long loading took."""
    sender.through = {1: 0, 2: 1}
    keep_up = keeping_up(sender, 2)
    assert tick_for(watch, 1.0, keep_up) is None
    sender.through[1] = 1
    assert tick_for(watch, 0.3, keep_up) is None
    assert tick_for(watch, 2.0, keep_up) == "rank 1 has made no progress for 0.5 s"


def test_a_rank_that_hangs_before_it_reports_that_it_has_loaded(sender, watch, has_loaded):
    sender.through = {1: 0, 2: 1}
    keep_up = keeping_up(sender, 2)
    assert tick_for(watch, 1.0, keep_up) is None
    has_loaded.append(True)
    assert tick_for(watch, 0.3, keep_up) is None
    assert tick_for(watch, 2.0, keep_up) == "rank 1 has made no progress for 0.5 s"


def test_a_step_that_does_not_return(sender, watch, lost, waiting_since):
    """The device hangs: all ranks report the step as completed, since it is queued. Runs the watchdog's thread."""
    sender.keeps_up = True
    waiting_since.append(1.0)
    watch.start()
    assert wait_until(lambda: bool(lost))
    assert lost == ["a step has not come back from the device for 0.5 s"]


def test_steps_that_return_one_after_the_other(sender, watch, waiting_since):
    sender.keeps_up = True
    for i in range(4):
        waiting_since.append(float(i))
        assert tick_for(watch, 0.4) is None
    waiting_since.append(None)
    assert tick_for(watch, 1.0) is None


def test_after_stop_no_rank_is_lost(sender, watch, lost):
    watch.start()
    watch.stop()
    sender.disconnected_ranks.add(1)
    assert not watch.is_alive()
    assert not lost
