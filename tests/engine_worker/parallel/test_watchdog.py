"""Who is lost, and who is only slow."""

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
    """Not started: most tests tick for it, so that no thread has to keep up with the clock."""
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


def look(watch: Watchdog, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> str | None:
    """Tick for so long, or until the group is lost; why it is. `meanwhile` is called before each tick."""
    for _ in range(round(seconds / TICK)):
        meanwhile()
        if reason := watch.tick(TICK):
            return reason
    return None


def keeping_up(sender: CommandSender, *ranks: int) -> Callable[[], None]:
    """These ranks are through with whatever has come."""

    def keep_up() -> None:
        sender.through |= dict.fromkeys(ranks, sender.sent)

    return keep_up


def test_one_that_has_nothing_to_do_is_not_lost(sender, watch):
    assert look(watch, 1.5, keeping_up(sender, 1, 2)) is None
    assert sender.commands[1:] == [Heartbeat()]


def test_one_that_gets_on_slowly_is_not_lost(sender, watch):
    for _ in range(50):
        sender.send(COMMAND)

    def get_on() -> None:
        sender.through = {1: sender.through[1] + 1, 2: sender.sent}

    for _ in range(10):
        get_on()
        assert look(watch, 0.4) is None


def test_one_that_does_not_get_on_is_lost(sender, watch):
    assert look(watch, 2.0, keeping_up(sender, 2)) == "rank 1 has made no progress for 0.5 s"


@pytest.mark.parametrize(("rank", "why"), [(1, "rank 1 has disconnected"), (2, "rank 2 was killed by SIGKILL")])
def test_one_that_has_gone_is_lost_at_once(sender, watch, lost, rank, why):
    """In its own thread."""
    watch.start()
    sender.disconnected_ranks.add(rank)
    assert wait_until(lambda: bool(lost))
    assert lost == [why]


def test_a_heartbeat_that_cannot_be_sent(sender, watch):
    sender.broken = True
    assert look(watch, 2.0) == "rank 2 has read nothing"


def test_nobody_is_kept_waiting_for_a_heartbeat(sender, watch):
    """While a command is being sent no heartbeat is needed."""
    sender.busy = True
    assert look(watch, 1.5) is None
    assert sender.sent == 1


def test_the_first_command_is_no_heartbeat(sender, watch):
    sender.commands.clear()
    look(watch, 1.5)
    assert sender.sent == 0


def test_loading_may_take_longer(sender, watch):
    """Whoever has taken long for it has as long for the next command as all others."""
    sender.through = {1: 0, 2: 1}
    keep_up = keeping_up(sender, 2)
    assert look(watch, 1.0, keep_up) is None
    sender.through[1] = 1
    assert look(watch, 0.3, keep_up) is None
    assert look(watch, 2.0, keep_up) == "rank 1 has made no progress for 0.5 s"


def test_a_step_that_does_not_come_back(sender, watch, lost, since):
    """As where the device hangs: all ranks are through with it, for they have queued it. In its own thread."""
    sender.keeps_up = True
    since.append(1.0)
    watch.start()
    assert wait_until(lambda: bool(lost))
    assert lost == ["a step has not come back from the device for 0.5 s"]


def test_steps_that_come_back_one_after_the_other(sender, watch, since):
    sender.keeps_up = True
    for i in range(4):
        since.append(float(i))
        assert look(watch, 0.4) is None
    since.append(None)
    assert look(watch, 1.0) is None


def test_after_its_end_nobody_is_lost(sender, watch, lost):
    watch.start()
    watch.stop()
    sender.disconnected_ranks.add(1)
    assert not watch.is_alive()
    assert not lost
