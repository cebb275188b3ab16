"""Stands in for `python -m router | engine_worker | detok_service` under the launcher: starts fast, does as it is told.

Run as `services.py FOLDER -m MODULE --flag value…`. Each writes its flags to FOLDER/<id>.json and its end to
FOLDER/<id>.ended. FOLDER/<id>.do may hold: "die" (end with code 3 after a traceback), "deaf" (on
SIGTERM, only write FOLDER/<id>.told), "hang" (never get ready), for the router "silent" (never answer a request).
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from sluice.ring.process import die_with_parent
from tests.fakes.server import Script, serve

LONGEST_SECONDS = 120
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
    (folder / f"{name}.json").write_text(json.dumps({"module": module, "flags": flags, "pid": os.getpid()}))
    order = folder / f"{name}.do"
    told = order.read_text() if order.exists() else ""
    if told == "die":
        print("Traceback: it broke", file=sys.stderr)
        sys.exit(3)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: (folder / f"{name}.told").touch() if told == "deaf" else stopped.set())
    if told == "hang":
        stopped.wait()
    if module == "engine_worker":
        for done in (0, 50, 100):
            log("loading", done=done, total=100)
    if module == "router":
        play_router(flags, stopped, told == "silent")
    else:
        Path(flags["--listen"].removeprefix("ipc://")).touch()
        log("ready", address=flags["--listen"])
        stopped.wait()
    (folder / f"{name}.ended").write_text(str(time.monotonic_ns()))


def play_router(flags: dict[str, str], stopped: threading.Event, silent: bool) -> None:
    """A fake server that reports the engines and detokenizers that have come up."""
    script = Script(hangs=silent)
    with serve(script) as address:
        log("ready", address=address)
        log("something odd", level="warning")
        log("detail")
        log("request", request_id="r1", outcome="ok")
        while not stopped.wait(0.02):
            for address in find(flags["--engines"]) - {engine.engine_id for engine in script.stats.engines}:
                script.stats.engines.add(engine_id=address)
            for address in find(flags["--detokenizers"]) - {each.detokenizer_id for each in script.stats.detokenizers}:
                script.stats.detokenizers.add(detokenizer_id=address)


def find(addresses: str) -> set[str]:
    """Those whose service is there."""
    return {address for address in addresses.split(",") if Path(address.removeprefix("ipc://")).exists()}


if __name__ == "__main__":
    main()
