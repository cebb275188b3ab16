"""The event loop that carries the calls of all executors of a process."""

import asyncio
import os
import threading
from functools import cache


def shared_loop() -> asyncio.AbstractEventLoop:
    """It runs in a thread of its own as long as the process.

    One for all, and never closed: grpc.aio has one completion queue per process, and what arrives there for a loop
    that was closed meanwhile is an error in whichever other loop finds it.
    """
    return _start(os.getpid())


@cache
def _start(_: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="sluice executor", daemon=True).start()
    return loop
