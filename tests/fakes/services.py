"""Stands in for `python -m router | engine_worker | detok_service` under the launcher: starts fast, does as it is told.

Run as `services.py FOLDER -m MODULE --flag value…`. Each writes its flags to FOLDER/<id>.json and its end to
FOLDER/<id>.ended. FOLDER/<id>.do may hold: "die" (end with code 3 after a traceback), "refuse" (say why it cannot
start), "deaf" (on SIGTERM, only write FOLDER/<id>.told), "hang" (never get ready), for the router "silent" (never
answer a request). It is read at each start.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from sluice.ring.process import die_with_parent, run_service
from sluice.telemetry.service_status import ProgressBeacon, ServiceStatus, StatusFile
from tests.fakes.server import Script, serve

LONGEST_SECONDS = 300
"""A deaf one whose test was killed ends too."""


def log(event: str, level: str = "info", **fields: object) -> None:
    """As structlog writes it."""
    print(json.dumps({"event": event, "level": level, **fields}), file=sys.stderr, flush=True)


def main() -> None:
    """Play one service."""
    die_with_parent()
    signal.alarm(LONGEST_SECONDS)
    folder, module, flags = Path(sys.argv[1]), sys.argv[3], dict(zip(sys.argv[4::2], sys.argv[5::2], strict=True))
    name = flags["--id"]
    order = folder / f"{name}.do"
    told = order.read_text() if order.exists() else ""
    stopped = Stopped()
    signal.signal(signal.SIGTERM, lambda *_: (folder / f"{name}.told").touch() if told == "deaf" else stopped.set())
    note = folder / f"{name}.note"
    note.write_text(json.dumps({"module": module, "flags": flags, "pid": os.getpid()}))
    # In one step, because tests read it meanwhile; who has read it may send a signal.
    note.rename(note.with_suffix(".json"))
    if told == "die":
        print("Traceback: it broke", file=sys.stderr)
        sys.exit(3)
    if told == "refuse":
        run_service(module, refuse)
    if told == "hang":
        stopped.wait()
    status_file = StatusFile()
    beacon = ProgressBeacon(status_file=status_file)
    if module == "engine_worker":
        for done in (0, 50, 100):
            log("loading", done=done, total=100)
    if module == "router":
        play_router(flags, stopped, status_file, beacon, told == "silent")
    else:
        Path(flags["--listen"].removeprefix("ipc://")).write_text(str(os.getpid()))
        status_file.report(ServiceStatus("ready", flags["--listen"], os.getpid()))
        log("ready", address=flags["--listen"])
        while not stopped.wait(0.02):
            beacon.touch()
    (folder / f"{name}.ended").write_text(str(time.monotonic_ns()))


class Stopped:
    """As threading.Event, which must not be set by a signal handler of the thread that waits for it: both take its
    lock."""

    def __init__(self) -> None:
        self._stopped = False

    def set(self) -> None:
        """May be called at any time."""
        self._stopped = True

    def wait(self, seconds: float = LONGEST_SECONDS) -> bool:
        """Whether it was set, after at most so many seconds."""
        end = time.monotonic() + seconds
        while not self._stopped and time.monotonic() < end:
            time.sleep(0.01)
        return self._stopped


def refuse() -> None:
    """As services do that cannot start."""
    raise SystemExit("the disk is full")


def play_router(
    flags: dict[str, str], stopped: Stopped, status_file: StatusFile, beacon: ProgressBeacon, silent: bool
) -> None:
    """A fake server that reports the engines and detokenizers that have come up."""
    script = Script(hangs=silent)
    heard: dict[str, str] = {}
    with serve(script, int(flags["--port"])) as address:
        log("ready", address=address)
        log("something odd", level="warning")
        log("detail")
        log("request_ended", request_id="r1", outcome="ok")
        while not stopped.wait(0.02):
            beacon.touch()
            for peer in [*flags["--engines"].split(","), *flags["--detokenizers"].split(",")]:
                hear(peer, heard, script)
            epochs = {Path(peer.removeprefix("ipc://")).name: int(pid) for peer, pid in heard.items()}
            status_file.report(ServiceStatus("ready", address, peers=epochs))


def hear(peer: str, heard: dict[str, str], script: Script) -> None:
    """Tell of a service that has come up, and of each that comes after it at its address."""
    socket = Path(peer.removeprefix("ipc://"))
    epoch = socket.read_text() if socket.exists() else ""
    if not epoch or heard.get(peer) == epoch:
        return
    if peer not in heard and socket.name.startswith("engine"):
        script.stats.engines.add(engine_id=socket.name)
    elif peer not in heard:
        script.stats.detokenizers.add(detokenizer_id=socket.name)
    heard[peer] = epoch


if __name__ == "__main__":
    main()
