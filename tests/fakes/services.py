"""Stands in for `python -m router | engine_worker | detok_service` under the launcher: starts fast, fails on demand.

Run as `services.py FOLDER -m MODULE --flag value…`. A gateway without an order is the real one. Another service writes
its flags to FOLDER/<id>.json when it starts, and FOLDER/<id>.ended when it ends. FOLDER/<id>.do, read at each start,
may contain an order:

- "die": end with code 3 after a traceback
- "refuse": exit with the reason why it cannot start
- "deaf": on SIGTERM, only create FOLDER/<id>.signalled
- "hang": never become ready
- "silent", for a router: never finish a request
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.host.process import die_with_parent, run_service
from sluice.telemetry.service_status import ProgressBeacon, ServiceStatus, StatusFile

if TYPE_CHECKING:
    from tests.fakes.server_script import Script

LONGEST_SECONDS = 300
"""Lifetime of a service, which ends it even if it is deaf and its test was killed."""


def log(event: str, level: str = "info", **fields: object) -> None:
    """Write a log line in the format of the real services."""
    print(json.dumps({"event": event, "level": level, **fields}), file=sys.stderr, flush=True)


def main() -> None:
    """Run one fake service."""
    die_with_parent()
    signal.alarm(LONGEST_SECONDS)
    folder, module, flags = Path(sys.argv[1]), sys.argv[3], dict(zip(sys.argv[4::2], sys.argv[5::2], strict=True))
    name = flags["--id"]
    order_file = folder / f"{name}.do"
    order = order_file.read_text() if order_file.exists() else ""
    if module == "gateway" and not order:
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    stopped = Stopped()
    signal.signal(
        signal.SIGTERM, lambda *_: (folder / f"{name}.signalled").touch() if order == "deaf" else stopped.set()
    )
    note = folder / f"{name}.note"
    note.write_text(json.dumps({"module": module, "flags": flags, "pid": os.getpid()}))
    # Renamed when complete, because tests poll for it. A test that has read it may send signals.
    note.rename(note.with_suffix(".json"))
    if order == "die":
        print("Traceback: it broke", file=sys.stderr)
        sys.exit(3)
    if order == "refuse":
        run_service(module, refuse)
    if order == "hang":
        stopped.wait()
    status_file = StatusFile()
    beacon = ProgressBeacon(status_file=status_file)
    if module == "engine_worker":
        for done in (0, 50, 100):
            log("loading", done=done, total=100)
    if module == "router":
        play_router(flags, stopped, status_file, beacon, order == "silent")
    else:
        Path(flags["--listen"].removeprefix("ipc://")).write_text(str(os.getpid()))
        status_file.report(ServiceStatus("ready", flags["--listen"], os.getpid()))
        log("ready", address=flags["--listen"])
        while not stopped.wait(0.02):
            beacon.touch()
    (folder / f"{name}.ended").write_text(str(time.monotonic_ns()))


class Stopped:
    """Like threading.Event, but may be set by a signal handler of the thread that waits for it.

    With threading.Event that can deadlock, because both `set` and `wait` acquire its lock.
    """

    def __init__(self) -> None:
        self._stopped = False

    def set(self) -> None:
        """May be called in a signal handler."""
        self._stopped = True

    def wait(self, seconds: float = LONGEST_SECONDS) -> bool:
        """Wait until it is set, at most `seconds`. Returns whether it is set."""
        deadline = time.monotonic() + seconds
        while not self._stopped and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._stopped


def refuse() -> None:
    """The main function of a service that cannot start."""
    raise SystemExit("the disk is full")


def play_router(
    flags: dict[str, str], stopped: Stopped, status_file: StatusFile, beacon: ProgressBeacon, silent: bool
) -> None:
    """Serve the API, and report engines and detokenizers as connected once they are up."""
    # Here, because the other services start faster without gRPC.
    from tests.fakes.server import serve
    from tests.fakes.server_script import Script

    script = Script(hangs=silent)
    connected: dict[str, str] = {}
    with serve(script, int(flags["--port"])) as address:
        log("ready", address=address)
        log("something odd", level="warning")
        log("detail")
        log("request_ended", request_id="r1", outcome="ok")
        while not stopped.wait(0.02):
            beacon.touch()
            for peer in [*flags["--engines"].split(","), *flags["--detokenizers"].split(",")]:
                connect(peer, connected, script)
            epochs = {Path(peer.removeprefix("ipc://")).name: int(pid) for peer, pid in connected.items()}
            status_file.report(ServiceStatus("ready", address, peers=epochs))


def connect(peer: str, connected: dict[str, str], script: "Script") -> None:
    """Note the process that is up at a peer's address, if any: the first one and each later one."""
    socket = Path(peer.removeprefix("ipc://"))
    epoch = socket.read_text() if socket.exists() else ""
    if not epoch or connected.get(peer) == epoch:
        return
    if peer not in connected and socket.name.startswith("engine"):
        script.stats.engines.add(engine_id=socket.name)
    elif peer not in connected:
        script.stats.detokenizers.add(detokenizer_id=socket.name)
    connected[peer] = epoch


if __name__ == "__main__":
    main()
