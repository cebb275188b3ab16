"""No false alarms: a ring on a busy machine in which no service dies must not report a lost peer.

python -m tests.chaos.alarms pauses a random service for half a second every few seconds, and rotates keys meanwhile.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from sluice.lanes.keys import ROLES, generate
from sluice.launch import LogLine, Ring
from tests.fakes.ports import free_ports

STOPPED_SECONDS = 0.5
EVERY_SECONDS = 4.0
ROTATE_EVERY = 5
"""Number of pauses between two key rotations."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.alarms")
    parser.add_argument("--seconds", type=float, default=180.0, help="for each of TCP with keys, and ipc")
    parser.add_argument("--busy", type=int, default=16, help="processes that keep the cores busy")
    arguments = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.busy)]
    try:
        lost = [count_lost_peers(keyed, arguments.seconds) for keyed in (True, False)]
    finally:
        for child in busy:
            child.kill()
            child.wait()
    return 1 if any(lost) else 0


def count_lost_peers(keyed: bool, seconds: float) -> int:
    """Disturb one ring and return how often it reported a lost peer. `keyed`: over TCP with keys, else over ipc."""
    lines: list[LogLine] = []
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name)
        for role in ROLES if keyed else ():
            generate(keys, role)
        with Ring(engines=1, detokenizers=1, observe=lines.append, **(over_tcp(keys) if keyed else {})) as ring:
            lines.clear()
            stops, rotations = disturb(ring, keys if keyed else None, seconds)
    lost = sum(line.fields.get("event") == "peer_lost" for line in lines)
    for line in lines if lost else ():
        if line.fields.get("event") in ("peer_lost", "peer_joined"):
            print(line.child, line.fields, flush=True)
    kind = "TCP with keys" if keyed else "ipc"
    print(f"{kind}: {seconds:g} s, {stops} stops, {rotations} rotations, {lost} peers lost", flush=True)
    return lost


def over_tcp(keys: Path) -> dict:
    first = free_ports(len(ROLES))
    address = {role: f"tcp://127.0.0.1:{first + i}" for i, role in enumerate(ROLES)}
    return {
        "keys": str(keys),
        "engine_args": {"listen": address["engine"]},
        "detokenizer_args": {"listen": address["detok"]},
        "router_args": {
            "listen": address["router"],
            "engines": address["engine"],
            "detokenizers": address["detok"],
        },
    }


def disturb(ring: Ring, keys: Path | None, seconds: float) -> tuple[int, int]:
    """Returns how often services were paused and keys rotated."""
    choices, deadline, stops, rotations = random.Random(0), time.monotonic() + seconds, 0, 0
    while time.monotonic() < deadline:
        pid = choices.choice(list(ring.pids.values()))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        os.kill(pid, signal.SIGCONT)
        stops += 1
        if keys is not None and stops % ROTATE_EVERY == 0:
            role = choices.choice(ROLES)
            generate(keys, role)
            print(f"{datetime.now(UTC):%H:%M:%S} new key of {role}", flush=True)
            rotations += 1
        time.sleep(EVERY_SECONDS)
    return stops, rotations


if __name__ == "__main__":
    sys.exit(main())
