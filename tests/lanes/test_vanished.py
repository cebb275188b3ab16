"""A machine vanishes without closing its connections: the lane to its name must find the name's new address.

Two network namespaces represent the machines, a third one the sender's machine, with a separate hosts file.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.processes import wait_until

PORT = 7000
ROOT = Path(__file__).parents[2]
SENDER = """
import sys, time, zmq
from sluice.wire.heartbeats import KeepAlive
from sluice.lanes.keys import Security
from sluice.lanes.lane import Lane
lane = Lane(zmq.Context(), "tcp://peer:7000", security=Security(insecure=True))
while True:
    lane.send(KeepAlive("engine", 1))
    time.sleep(float(sys.argv[1]))
"""
RECEIVER = """
import sys, zmq
from sluice.lanes.inbox import Inbox
from sluice.lanes.keys import Security
from sluice.wire.requests import ToDetokenizer
inbox = Inbox(zmq.Context(), f"tcp://{sys.argv[1]}:7000", ToDetokenizer, security=Security(insecure=True))
while True:
    inbox.wait(60)
    for message in inbox.receive():
        print(type(message).__name__, flush=True)
"""

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(120)]


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {arguments}: {done.stderr}"


def missing() -> str | None:
    if os.getuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    name = f"sluice-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "needs the permission to make network namespaces"
    ip("netns", "delete", name)
    return None


class Network:
    """The sender's machine with a bridge, to which other machines are attached."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._prefix = f"sluice-{os.getpid()}"
        self.sender = self._add("sender")
        ip("-n", self.sender, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.sender, "address", "add", "10.99.0.1/24", "dev", "bridge")
        ip("-n", self.sender, "link", "set", "bridge", "up")
        self._hosts = Path("/etc/netns") / self.sender / "hosts"
        self._hosts.parent.mkdir(parents=True)
        stack.callback(shutil.rmtree, self._hosts.parent)
        self.name_peer("10.99.0.2")

    def machine(self, number: int) -> str:
        """A machine at 10.99.0.NUMBER."""
        name = self._add(f"peer{number}")
        ip("-n", self.sender, "link", "add", f"to{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("-n", self.sender, "link", "set", f"to{number}", "master", "bridge", "up")
        ip("-n", name, "address", "add", f"10.99.0.{number}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        return name

    def name_peer(self, address: str) -> None:
        self._hosts.write_text(f"{address} peer\n")

    def run(self, machine: str, code: str, argument: str, log: Path) -> None:
        command = ["ip", "netns", "exec", machine, sys.executable, "-c", code, argument]
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, cwd=ROOT)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def _add(self, name: str) -> str:
        ip("netns", "add", f"{self._prefix}-{name}")
        self._stack.callback(ip, "netns", "delete", f"{self._prefix}-{name}")
        return f"{self._prefix}-{name}"


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield Network(stack)


def grows(log: Path) -> Callable[[], bool]:
    size = log.stat().st_size
    return lambda: log.stat().st_size > size


def test_a_lane_to_a_name_finds_its_new_address(network: Network, tmp_path: Path) -> None:
    logs = [tmp_path / "2", tmp_path / "3"]
    machines = [network.machine(number) for number in (2, 3)]
    for machine, log in zip(machines, logs, strict=True):
        network.run(machine, RECEIVER, f"10.99.0.{log.name}", log)
    network.run(network.sender, SENDER, "0.2", tmp_path / "sender")
    assert wait_until(grows(logs[0]))
    ip("-n", machines[0], "link", "set", "eth0", "down")
    network.name_peer("10.99.0.3")
    # Without TCP_MAXRT, the kernel would close the connection after a quarter of an hour.
    assert wait_until(grows(logs[1]))
