"""Exhausted file descriptors, in a separate process with low limits, because an error may end the process."""

import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from sluice.host.descriptors import RESERVED, check_limit
from tests.fakes.processes import LIMIT

pytestmark = pytest.mark.process

PREAMBLE = f"""
import os, resource, sys, time
import zmq
from sluice.wire.heartbeats import Hello
from sluice.host.descriptors import reserve, raise_limit
from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import Lane

def soft():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

def fill():
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        return held

def until(condition):
    end = time.monotonic() + {LIMIT}
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

context = zmq.Context()
inbox = Inbox(context, "ipc://" + sys.argv[1], Hello)
"""


def run(tmp_path, code: str) -> str:
    command = [sys.executable, "-c", PREAMBLE + code, str(tmp_path / "inbox")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=2 * LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_limit_is_raised_except_for_the_reserve(tmp_path):
    code = """
for hard in (20000, 512, 64):
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft(), 64), hard))
    assert raise_limit() == soft() == hard - {20000: 128, 512: 64, 64: 8}[hard]
    with reserve():
        assert soft() == hard
        with reserve():
            pass
    assert soft() < hard
print("done")
"""
    assert run(tmp_path, code) == "done\n"


@pytest.mark.parametrize("watched", [False, True])
def test_a_lane_without_a_free_descriptor_is_not_ready_and_is_retried(tmp_path, watched):
    code = f"""
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
first = Lane(context, inbox.address, watched={watched})
until(lambda: first.send(Hello("first", "a")) and inbox.wait(1))
held = fill()
lanes = [Lane(context, inbox.address, watched={watched}) for _ in range(4)]
for left in range(4):
    for lane in lanes:
        lane.send(Hello("none", "a")), lane.hung_up()
    assert not any(lane.open or lane.ready() for lane in lanes)
    time.sleep(0.3)
    if left < 2:
        os.close(held.pop()) if {watched} else None
for descriptor in held:
    os.close(descriptor)
inbox.receive()
for lane in lanes:
    until(lambda: lane.send(Hello("again", "a")))
    assert lane.open
until(lambda: inbox.wait(1) and inbox.receive())
for lane in [first, *lanes]:
    lane.close()
inbox.close()
context.term()
print("done")
"""
    assert run(tmp_path, code) == "done\n"


def test_a_lane_uses_the_reserve(tmp_path):
    """Connections of unknown clients use all other descriptors."""
    code = """
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
raise_limit()
fill()
lane = Lane(context, inbox.address, watched=True)
assert lane.open
print(soft(), flush=True)
os._exit(0)
"""
    assert run(tmp_path, code) == f"{256 - 256 // 8}\n"


def test_a_limit_below_the_needs_of_the_settings_is_logged_as_a_warning():
    with capture_logs() as logs:
        check_limit(1000, 1000, structlog.get_logger())
        check_limit(999, 1000, structlog.get_logger())
    (line,) = logs
    assert (line["log_level"], line["limit"], line["needed"]) == ("warning", 999, 1000)
    assert str(1000 + RESERVED) in line["remedy"]
